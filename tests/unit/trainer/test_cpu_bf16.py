from trainer import cpu_bf16


def test_the_probe_succeeds_with_the_safe_instruction_set() -> None:
    assert cpu_bf16.survives_bf16(cpu_bf16.SAFE_ISA)

"""Small objects with correct digests that require much memory, each read under a limit of address
space.

`python -m tests.support.stores.bombs` reads every one of them and prints a JSON object: name → [kind of error, its
message]. It is a process of its own, because the limit is.
"""

import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

os.environ["ARROW_DEFAULT_MEMORY_POOL"] = (
    "system"  # other allocators reserve gigabytes of address space
)
os.environ["MALLOC_ARENA_MAX"] = "1"

import numpy as np
import pyarrow as pa

from data_ops.config import DataConfig, PolicyData
from data_ops.dataflow.service import Dataflow
from data_ops.prompts import BuiltinPrompts
from storage import layout
from storage.coordination import heartbeats
from storage.errors import CorruptError
from storage.formats import arrow_files
from storage.formats.arrow_files import schema_of
from storage.formats.json_objects import seal, unseal
from storage.formats.safetensors import (
    file_digest,
    from_safetensors,
    to_safetensors,
    weights_digest,
)
from storage.records.control import OrdersEnd
from storage.records.rollouts import Order, Prompt
from storage.records.types import Json
from storage.records.weights import FileInfo, HostTensor, Manifest
from storage.run import batches, checkpoints, orders, runs, shards
from storage.store.object_store import ObjectStore, open_store
from storage.verify.verify import verify
from storage.weights import delta_store, manifests, publisher, reader, update_path
from storage.weights.codec import delta_blocks
from storage.weights.manifests import LoadedWeights
from tasks.recipes.run_terms import run_terms
from tests.support.runs import builders
from tests.support.stores.resealed import (
    ZEROS,
    arrow_file,
    of_bytes,
    replace_file,
    resealed,
    resealed_text,
    rewritten,
    safetensors_file,
)

SPACE = 2**28
"""Bytes of address space that reading one object may take beside what the process has. The objects
are smaller than 100 KB, but for those of whose values there are too many.
"""
Read = Callable[[], object]
NUMBERS = schema_of({"n": pa.int32()})


def numbers(count: int) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array(np.zeros(count, np.int32))], schema=NUMBERS)


def store() -> ObjectStore:
    return open_store(f"memory://{os.urandom(8).hex()}")


def shards_that_claim() -> Iterator[tuple[str, Read]]:
    def change(count: int, header: Json) -> None:
        header["groups"][0]["episodes"][0]["num_sequences"] = count

    for name, count in {
        "2e7": 2 * 10**7,
        "2^63 - 1": 2**63 - 1,
        "-1": -1,
        "10^400": 10**400,
    }.items():
        body = rewritten(
            shards.encode(builders.shard()), shards.SCHEMA, shards.KIND, partial(change, count)
        )
        yield f"a shard of {name} sequences", partial(shards.decode, body)


def arrow_files_that_claim() -> Iterator[tuple[str, Read]]:
    def read(body: bytes) -> Read:
        return partial(arrow_files.decode, body, NUMBERS, "test")

    yield (
        "columns of zeros under zstd",
        read(arrow_file(NUMBERS, [numbers(2**25)], "test", {}, "zstd")),
    )
    yield (
        "rows of zeros under zstd",
        read(arrow_file(NUMBERS, [numbers(2**20)], "test", {}, "zstd")),
    )
    yield (
        "too many record batches",
        read(arrow_file(NUMBERS, [numbers(1)] * 5000, "test", {}, None)),
    )


def deltas_that_claim() -> Iterator[tuple[str, Read]]:
    zeros = pa.Codec("zstd", compression_level=1).compress(bytes(2**26), asbytes=True) * 8
    header = delta_blocks._RUN.pack
    bits = np.zeros(1000, dtype=np.uint16)
    for name, body in {
        "a change of 2^29 elements": header(2**29, 0, len(zeros), 0, 0, len(zeros), 0, 0)
        + zeros
        + zeros,
        "a change of 2^32 elements": header(2**32 - 1, 0, len(zeros), 0, 0, len(zeros), 0, 0)
        + zeros
        + zeros,
        "a stream that is longer than its block": header(
            1000, 0, len(zeros), 0, 0, len(zeros), 0, 0
        )
        + zeros
        + zeros,
    }.items():
        block = (
            delta_blocks._BLOCK.pack(
                delta_blocks._BLOCK.size + len(body), 0, delta_blocks.STEPS, 1, 0
            )
            + body
        )
        yield name, partial(delta_blocks.apply, bits.copy(), memoryview(block))
    planes = len(zeros).to_bytes(4, "little") + zeros
    block = (
        delta_blocks._BLOCK.pack(
            delta_blocks._BLOCK.size + 2 * len(planes), 0, delta_blocks.PLANES, 1, 0
        )
        + 2 * planes
    )
    yield (
        "planes that are longer than their block",
        partial(delta_blocks.apply, bits.copy(), memoryview(block)),
    )


def multiplied(length: int) -> tuple[ObjectStore, LoadedWeights]:
    """Versions each of which makes four tensors of each tensor before, by changes without bytes;
    version 0 has one of a mebibyte.
    """
    run, tensors = store(), {"w": HostTensor("U8", (2**20,), np.zeros(2**20, np.uint8))}
    loaded = LoadedWeights(publisher.publish(run, "p", 0, tensors), tensors)
    infos, file = loaded.manifest.tensors, f"{ZEROS}.delta-00000.safetensors"
    for version in range(1, length + 1):
        infos = {
            f"{source}{copy}": replace(info, file=file, entry="", source=source)
            for source, info in infos.items()
            for copy in range(4)
        }
        body = to_safetensors({name: of_bytes(b"") for name in infos}, delta_store.CODEC)
        folder = layout.weights("p", version)
        run.put(f"{folder}/{file}", body)
        manifest = replace(
            loaded.manifest,
            version=version,
            parent=version - 1,
            batch=version,
            kind="delta",
            base=version - 1,
            tensors=infos,
            digest=weights_digest(infos),
            files=(FileInfo(file, len(body), file_digest(body)),),
        )
        run.put(layout.manifest(folder), seal(manifest))
    return run, loaded


def versions_that_claim() -> Iterator[tuple[str, Read]]:
    """Each is version 1 of a policy with a version 0 of one tensor of a mebibyte."""

    def second(
        change: Callable[[Manifest], Manifest], body: bytes = b""
    ) -> tuple[ObjectStore, LoadedWeights]:
        run, tensors = store(), {"w": HostTensor("U8", (2**20,), np.arange(2**20, dtype=np.uint8))}
        loaded = LoadedWeights(publisher.publish(run, "p", 0, tensors), tensors)
        moved = tensors["w"].bits.copy()
        moved[5] += 1
        publisher.publish(run, "p", 1, {"w": HostTensor("U8", moved.shape, moved)}, base=loaded)
        manifest = replace_file(run, "p", 1, lambda old: body or old)
        manifest = change(manifest)
        run.put(manifest_key, seal(replace(manifest, digest=weights_digest(manifest.tensors))))
        return run, loaded

    def go(run: ObjectStore, loaded: LoadedWeights) -> object:
        manifest = manifests.read_manifest(run, "p", 1)
        return update_path.apply_path(run, manifest, update_path.path_deltas(manifest), loaded)

    def many_changes(manifest: Manifest) -> Manifest:
        info = manifest.tensors["w"]
        return replace(manifest, tensors={name: replace(info, entry=name) for name in names})

    def file_of(size: int) -> Callable[[Manifest], Manifest]:
        return lambda manifest: replace(
            manifest, files=(replace(manifest.files[0], num_bytes=size),)
        )

    def shape_of(shape: object) -> Callable[[Json], None]:
        return lambda fields: fields["tensors"]["w"].update(shape=shape)

    manifest_key = layout.manifest(layout.weights("p", 1))
    names = [f"w{number}" for number in range(2000)]
    result = second(
        many_changes, to_safetensors({name: of_bytes(b"") for name in names}, delta_store.CODEC)
    )
    yield "two thousand changes of one tensor", partial(go, *result)
    run, loaded = multiplied(5)
    yield "five deltas of four changes of each tensor", partial(reader.read, run, "p", 5)

    def one_by_one() -> None:
        weights = loaded
        for version in range(1, 6):
            weights = reader.read(run, "p", version, weights)

    yield "the same, one by one", one_by_one
    run, _ = second(lambda manifest: manifest)
    anchor = manifests.read_manifest(run, "p", 0)
    named = {name: replace(anchor.tensors["w"], entry="w") for name in names}
    anchor = replace(anchor, tensors=named, digest=weights_digest(named))
    run.put(layout.manifest(layout.weights("p", 0)), seal(anchor))
    yield "one tensor of an anchor under two thousand names", partial(reader.read, run, "p", 0)
    for size in (2**60, 2**63 - 1):
        yield f"a file of {size} bytes", partial(go, *second(file_of(size)))
    run, _ = second(lambda manifest: manifest)
    whole = run.get(manifest_key)
    for name, shape in {
        "a hundred thousand dimensions of 2^62": [2**62] * 10**5,
        "sixty dimensions of 2^40": [2**40] * 60,
        "a boolean": [True],
        "a negative size": [-1],
        "four thousand digits": [10**3999],
    }.items():
        run = store()
        run.put(manifest_key, resealed(whole, shape_of(shape)))
        yield f"a manifest with a shape of {name}", partial(manifests.read_manifest, run, "p", 1)

    def huge(manifest: Manifest) -> Manifest:
        return replace(manifest, tensors={"w": replace(manifest.tensors["w"], shape=(2**40,) * 60)})

    run, _ = second(huge)
    yield "a manifest with a tensor of 2^2400 bytes", partial(manifests.read_manifest, run, "p", 1)


def safetensors_that_claim() -> Iterator[tuple[str, Read]]:
    def entry(shape: str = "[1]", offsets: str = "[0,1]", dtype: str = "U8") -> str:
        return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}'

    for name, header, data in [
        ("65 dimensions", f'{{"x":{entry(str([1] * 65))}}}', b"1"),
        ("a hundred thousand dimensions", f'{{"x":{entry(str([2**62] * 10**5))}}}', b"1"),
        ("a size of 2^70", f'{{"x":{entry(f"[{2**70}]")}}}', b"1"),
        ("an empty tensor of 2^70", f'{{"x":{entry(f"[0,{2**70}]", "[0,0]")}}}', b""),
        (
            "an empty tensor of 2^62 x 2^62",
            f'{{"x":{entry(f"[0,{2**62},{2**62}]", "[0,0]")}}}',
            b"",
        ),
        ("booleans as offsets", f'{{"x":{entry("[1]", "[false,true]")}}}', b"1"),
        ("a boolean as size", f'{{"x":{entry("[true]")}}}', b"1"),
        ("nesting", f'{{"x":{"[" * 200_000}{"]" * 200_000}}}', b""),
        ("nested objects", '{"a":' * 50_000 + "1" + "}" * 50_000, b""),
        ("nesting that is nearly read", f'{{"x":{{"shape":{"[" * 900}{"]" * 900}}}}}', b""),
        ("a size of four thousand digits", f'{{"x":{entry("[" + "9" * 4000 + "]")}}}', b"1"),
        (
            "an offset of five thousand digits",
            f'{{"x":{entry("[1]", "[0," + "9" * 5000 + "]")}}}',
            b"1",
        ),
        ("a name that is there twice", f'{{"x":{entry()},"x":{entry()}}}', b"1"),
        (
            "overlapping tensors",
            f'{{"x":{entry("[2]", "[0,2]")},"y":{entry("[2]", "[1,3]")}}}',
            b"123",
        ),
        ("a gap", f'{{"x":{entry()},"y":{entry("[1]", "[2,3]")}}}', b"123"),
        (
            "the same bytes many times",
            "{" + ",".join(f'"{n}":{entry("[9]", "[0,9]")}' for n in range(2000)) + "}",
            b"1" * 9,
        ),
        ("a number that is none", f'{{"x":{entry("[NaN]")}}}', b"1"),
        ("half a character", f'{{"\\ud800":{entry("[2]")}}}', b"1"),
    ]:
        yield name, partial(from_safetensors, safetensors_file(header, data))


def json_that_claims() -> Iterator[tuple[str, Read]]:
    def order(fields: str) -> bytes:
        head = f'{{"format":1,"write_id":"{ZEROS}","checksum":"{ZEROS}","number":0,"prompts":[]'
        return resealed_text(
            f'{head},"seen":[],"cursor":{{}},"seed":0,"samples_per_prompt":1,{fields}}}'
        )

    for name, fields in {
        "nested lists": '"x":' + "[" * 100_000 + "]" * 100_000,
        "nested objects": '"x":' + '{"x":' * 100_000 + "1" + "}" * 100_000,
        "an integer of four thousand digits": '"seed":' + "9" * 4000,
        "an integer of five thousand digits": '"x":' + "9" * 5000,
        "an integer of 2^128": f'"cursor":{{"x":[{2**128}]}}',
        "a count of 2^63": f'"seed":{2**63}',
        "three million lists": '"x":[' + "[]," * 3_000_000 + "1]",
        "a million wrong objects": '"prompts":[' + "{}," * 1_000_000 + "1]",
        "a negative count": '"samples_per_prompt":-1',
    }.items():
        yield f"JSON with {name}", partial(unseal, Order, order(fields), "orders/00000000.json")
    end = f'{{"format":1,"write_id":"{ZEROS}","checksum":{"1" * 32}}}'.encode()
    yield "a checksum that is a number", partial(unseal, OrdersEnd, end, "orders/end.json")
    heartbeat = (
        f'{{"format":1,"write_id":"{ZEROS}","progress":{{"closed_below":{"9" * 4000}}}}}'.encode()
    )
    yield "a heartbeat of a long number", partial(heartbeats.parse, heartbeat, "heartbeats/x")
    run = store()
    run.put(
        layout.order(0),
        seal(
            Order(
                number=0,
                prompts=(Prompt("p", {"question": "?"}),),
                samples_per_prompt=10**9,
                seed=0,
                seen=(),
                cursor={},
            )
        ),
    )
    yield "an order of 10^9 episodes", partial(orders.read, run, 0)
    nested = f'{{"format":1,"write_id":"{ZEROS}","checksum":"{ZEROS}","x":{"[" * 999}{"]" * 999}}}'
    run.put(layout.manifest(layout.checkpoint("p", 3)), resealed_text(nested))
    yield "a checkpoint with nesting", partial(checkpoints.newest, run, "p")


def bombs() -> Iterator[tuple[str, Read]]:
    """Name and reader of each."""
    yield from shards_that_claim()
    yield from arrow_files_that_claim()
    yield from deltas_that_claim()
    yield from versions_that_claim()
    yield from safetensors_that_claim()
    yield from json_that_claims()
    yield from runs_that_claim()


def runs_that_claim() -> Iterator[tuple[str, Read]]:
    """A run whose only batch claims that every order below 10^9 has been ingested."""
    config = DataConfig(prompts=BuiltinPrompts(builtin="chained_addition"), samples_per_prompt=2)
    fields = {
        "steps": 4,
        "policies": {"solver": {"batch_size": 1}},
        "data": config.model_dump(mode="json"),
    }
    run = runs.create_run(store(), "r", fields)
    batches.create(run, builders.batch(policy="solver", step=1, shards=(), closed_below=10**9))

    def judged() -> None:
        raise CorruptError(
            "; ".join(violation.what for violation in verify(run, run_terms(run)).violations)
        )

    yield "verify of a batch that closes 10^9 orders", judged
    policies = {"solver": PolicyData(batch_size=1, steps=4)}
    yield (
        "the dataflow after a batch that closes 10^9 orders",
        partial(Dataflow, run, config, policies, seed=0, max_tokens=512),
    )


def limited(read: Read) -> object:
    """Return or raise what `read` does with little address space."""
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (taken + SPACE, hard))
    try:
        return read()
    except Exception as error:
        return error
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard, hard))


def told(violations: object) -> list[str]:
    is_corrupt = isinstance(violations, CorruptError)
    return [
        "CorruptError" if is_corrupt else type(violations).__name__,
        str(violations)[:500] if isinstance(violations, Exception) else "",
    ]


def main() -> None:
    threading.stack_size(2**18)
    json.dump({name: told(limited(read)) for name, read in bombs()}, sys.stdout)


if __name__ == "__main__":
    main()

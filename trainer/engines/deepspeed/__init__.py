"""The train engine `deepspeed`: the step of the engine `torch`, shared out over ranks by ZeRO."""

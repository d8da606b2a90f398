"""The train engine `torch`, in one process or on several ranks by FSDP2."""

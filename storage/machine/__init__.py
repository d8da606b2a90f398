"""What the processes of one machine share: its GPUs, and its folder of temporary files."""

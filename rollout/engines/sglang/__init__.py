"""The rollout engine `sglang`: SGLang servers, as processes of the worker or by URL."""

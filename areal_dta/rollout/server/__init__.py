"""Embedded inference server speaking SGLang's HTTP contract; needs torch and aiohttp, not areal.

``api`` (event loop, HTTP) -> ``engine`` (the model thread) -> ``scheduler`` (what runs in a step) -> ``runner`` (the
forward pass) -> ``paged_attention``, ``kv_cache``, ``sampler``. Nothing points up.
"""

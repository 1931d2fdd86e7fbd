"""SGLang engines: server processes, the engine over HTTP, a pool of them, and the receiver inside each server.

Importing this package imports nothing of SGLang. `options` is light enough for planning.
"""

"""What the gate and the front both know of HTTP: ASGI's messages, and the paths of vLLM's server."""

"""Owns the HTTP face of the engine: an OpenAI-compatible server.

Run it as `python -m ddtree_jax.serve`. It sees token ids, text and the engine's
requests and deltas. Does not know about arrays, JAX, pages or the model. Read
`app.py` first.

    __main__      flags -> EngineConfig -> a running server
    server        sockets, signals, the ready line
    app           routes
    intake        body -> checked request -> engine requests
    schema        the requests, field by field
    bridge        engine thread -> event loop; cancellation
    wire          responses and server-sent events
    http_errors   every error as the one error body
    openapi       the document behind /openapi.json
"""

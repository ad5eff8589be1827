"""SGLang behind the engine's protocol: in this process's keep, or servers behind addresses.

    calls      what one call asks for and what came back, in SGLang's words
    backend    what every running SGLang is asked: generate, and control requests by name
    arguments  the configuration -> server arguments, checked against the installed version
    platform   the plug-in by which SGLang runs on a machine without an accelerator
    host       `sglang.Engine` on a thread of its own, and its processes
    engine     `SGLangEngine`: one host (`own_calls`: a call that is told to abort ends)
    server     one server behind an address, asked over HTTP
    pool       several servers: who is well (`member`), and who gets which call (`server_calls`)
    server_engine  `SGLangServerEngine`: a pool
    connecting     the configuration -> a pool, and the way that new weights take to it
    launch     local servers, started and kept running (`serving` is the process of one)
    weights    new weights, whole or not at all: by `transports`, in `buckets` of bounded size,
               under the `names` of the model's files; calls wait at a `gate` meanwhile
    sleeping   memory given back and taken again (`devices`: who can open whose)

Only modules of this folder and `engines/sglang_parsers.py` import sglang, and those on first use.
"""

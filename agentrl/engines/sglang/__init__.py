"""SGLang, inside this process or as servers.

    arguments   the configuration as server arguments, checked against the installed version
    backend     the interface of one running SGLang, and its memory during sleep
    calls       engine calls as SGLang requests; the base class of both engines
    inprocess/  `SGLangEngine`: `sglang.Engine` on a thread of this process
    servers/    `SGLangServerEngine`: a pool of servers over HTTP; local servers (`agentrl serve`)
    weights/    weight updates: buckets and transports
    parsers     SGLang's tool-call parsers
    platform    the plug-in with which SGLang runs without an accelerator

Only modules of this package import sglang, on first use.
"""

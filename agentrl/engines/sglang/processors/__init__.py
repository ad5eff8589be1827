"""SGLang's processors of images and videos, which SGLang imports itself.

It does so if the environment has `SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE` with this package's name.
"""

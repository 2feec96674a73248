"""The windows of `AdaptiveTBPTT` inside training loops of other packages.

Nothing is imported here, since each needs its framework:
`from adaptive_tbptt.integrations.lightning import TBPTTModule` needs the extra `lightning`.
"""

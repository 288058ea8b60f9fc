"""Which cost model prices which kind of kernel? (name -> module with PARAMETERS and a vectorised ``seconds``)"""

from moesim.costs import (
    attention, collectives, core_attention, core_gemm, core_grouped_gemm, core_memory, dispatch, fused_ffn, gemm, grouped_gemm, memory_bound,
)

COSTS = {
    "gemm": gemm,
    "grouped_gemm": grouped_gemm,
    "fused_ffn": fused_ffn,
    "attention": attention,
    "memory_bound": memory_bound,
    "collectives": collectives,
    "dispatch": dispatch,
    "core_gemm": core_gemm,
    "core_grouped_gemm": core_grouped_gemm,
    "core_attention": core_attention,
    "core_memory": core_memory,
}

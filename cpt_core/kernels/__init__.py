"""The quantised operator and its executions: plain torch, C++ on a CPU, Triton on a GPU."""

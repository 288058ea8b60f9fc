"""Tokens from text to the step that trains on them: tokenizer, shards, packed rows, a global order, batches of a rank.

    build   text, JSONL, Parquet -> shards (cli.py, build.py, inputs.py, tokenizer.py, writer.py); corpus.py makes a small real one offline
    read    shards.py -> packing.py (rows) -> order.py (which row is sample i) -> loader.py (this rank's Batch of step t)

Only batch.py and loader.py import torch.
"""

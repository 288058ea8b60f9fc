"""What happened in a run, and can it be believed? (Log lines, FLOP and memory ledgers, spans, preflight, provenance.)

One file one question; nothing here changes what is trained. Every figure says what it was divided by, every skipped, dropped
or excluded thing is counted, and what can't be known is UNKNOWN.
"""

"""Play the recorded actions of every task and print how many score 1.0: a check of the adapter.

No model and no user simulator is asked: a script is the policy, and the user states the task once.

    python examples/tau_bench/tau_retail.py data/tau_retail.jsonl
    python examples/tau_bench/play_recorded.py FOLDER_WITH_A_TOKENIZER data/tau_retail.jsonl
"""

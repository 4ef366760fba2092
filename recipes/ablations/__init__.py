"""The ablation study: the recipe of clover-nano against variants that differ from it in one thing.

`variants` says which, `study` trains and evaluates them, `results` keeps what they scored, `report`
compares it.
"""

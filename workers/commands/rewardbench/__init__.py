"""`penstock rewardbench`: pairs scored by a served reward model (`command.py`), and their sections (`summary.py`)."""

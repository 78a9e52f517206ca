"""`penstock rescore`: a run's groups scored again (`command.py`), and the two scores compared (`summary.py`)."""

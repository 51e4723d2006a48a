"""Parts of ``train_eagle_head.py``: text and features of the target, the head, training, evaluation."""

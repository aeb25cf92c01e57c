from cuflash.compat.bert_padding import *  # noqa: F403

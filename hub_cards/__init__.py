"""Model card templates (Jinja), rendered by `huggingface_hub.ModelCard.from_template`.

A regular package and not a namespace, since an editable install finds only the former under another folder name.
"""

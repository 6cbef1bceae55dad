"""What the recipes share. A recipe is started as a script, so this folder, beside it, is on the import path."""

"""The papers' analyses, one command each; they import what the recipes beside this folder share."""

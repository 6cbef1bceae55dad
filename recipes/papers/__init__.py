"""The papers' tables and figures. A figure reads a folder of finished runs; none of them trains."""

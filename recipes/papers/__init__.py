"""The papers' numbers, tables and figures, which read a folder of finished runs; none of them
trains.
"""

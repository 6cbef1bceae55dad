"""Model card templates (Jinja), rendered by `houlsby_peft.hub.card`.

This is a regular package, not a namespace package, because an editable install does not find a
namespace package in a folder of another name.
"""

"""Answers to chats, wherever they come from, behind one Protocol."""

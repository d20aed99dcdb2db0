"""From chats to batches."""

"""Arrays on their way to where they are read: arguments, what one mesh hands to another, rows of stacked state."""

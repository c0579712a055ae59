"""What an agent keeps and tells for one DRA driver, whether it runs inside that driver or beside it."""

"""Parts that serve one DRA driver, whether the agent runs inside that driver or next to it."""

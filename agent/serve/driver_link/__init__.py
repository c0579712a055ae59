"""gRPC service ``drahealth.v1.DriverLink``, through which a DRA driver in another process uses the agent."""

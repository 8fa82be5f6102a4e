"""What all services of Pagefleet share: messages, parameters, transport, settings, observation."""

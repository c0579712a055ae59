from agent.api import *
from agent.version import VERSION as __version__

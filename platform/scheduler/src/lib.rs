//! Places pods on nodes: cache, snapshot, plan, bind.

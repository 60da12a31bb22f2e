//! One shared, decoded copy of each kind a process needs.

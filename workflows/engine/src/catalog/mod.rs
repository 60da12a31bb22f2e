//! State machines, versions, aliases, activities, tags.

//! JSONata with AWS's changes and limits that hold.

//! What several tests share.

pub mod bench;

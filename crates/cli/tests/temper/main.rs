//! The binary from outside: every command, exit code and file as a user meets them.

mod architectures;
mod arguments;
mod beginning;
mod behaviour;
mod bench;
mod damage;
mod data;
mod export;
mod generate;
#[path = "../../../comm/tests/common/hosts.rs"]
mod hosts;
mod job;
mod killing;
mod layout;
mod measured;
mod models;
mod non_finite;
mod plan;
mod ranks;
mod resume;
mod safetensors;
mod support;
mod training;
mod verify;

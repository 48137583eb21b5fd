//! Worlds of several ranks within one process, over every transport, and what all collectives must give.
#![allow(dead_code)] // each test file uses a part of it

pub mod collectives;
pub mod hosts;

pub use collectives::value;
use std::{net::TcpListener, sync::Arc, time::Duration};
use temper_comm::{Comm, HostWorld, Result, Tcp, World, tcp, threads};
use temper_tensor::{Tensor, cpu::Cpu};

/// A rank that is waited for so long fails its test.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How ranks exchange.
#[derive(Clone, Copy, Debug)]
pub enum Transport {
    Threads,
    Tcp,
}

pub const TRANSPORTS: [Transport; 2] = [Transport::Threads, Transport::Tcp];

/// An address of this host that nobody listens on.
pub fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// How a rank joins, with all else as it should be.
pub fn joining(rank: usize, size: usize, master: &str) -> Tcp<'_> {
    Tcp { rank, size, master, job: "test", fingerprint: "the same", announce: None, patience: PATIENCE }
}

/// Runs `join` for every rank on a thread of its own.
pub fn join_all(size: usize, join: impl Fn(usize) -> Result<HostWorld> + Sync) -> Vec<Result<HostWorld>> {
    std::thread::scope(|scope| {
        let join = &join;
        let ranks: Vec<_> = (0..size).map(|rank| scope.spawn(move || join(rank))).collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// The worlds of `n` ranks.
pub fn worlds(transport: Transport, n: usize, patience: Duration) -> Vec<HostWorld> {
    match transport {
        Transport::Threads => threads(n, patience),
        Transport::Tcp => {
            let master = free_address();
            let joined = join_all(n, |rank| tcp(&Tcp { patience, ..joining(rank, n, &master) }));
            joined.into_iter().map(|w| w.unwrap()).collect()
        }
    }
}

/// Runs `work` on every rank of a group of `n` and gives its results in the order of ranks.
pub fn on_all<T: Send>(transport: Transport, n: usize, work: impl Fn(Arc<dyn Comm>, usize) -> T + Sync) -> Vec<T> {
    let worlds = worlds(transport, n, PATIENCE);
    std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                scope.spawn(move || {
                    let rank = world.rank();
                    work(everyone(&world), rank)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// The group of all ranks.
pub fn everyone(world: &HostWorld) -> Arc<dyn Comm> {
    let members: Vec<usize> = (0..world.size()).collect();
    world.group("all", &members).unwrap()
}

pub fn tensor(rank: usize, len: usize) -> Tensor {
    Tensor::from_vec((0..len).map(|i| value(rank, i) as f32).collect::<Vec<f32>>(), &[len])
}

/// Every collective against its definition; see [`collectives`].
pub fn check_collectives(comm: &dyn Comm, scale: usize) {
    collectives::check_collectives(comm, &Cpu::new(1), scale);
}

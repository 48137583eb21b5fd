//! Worlds of several ranks within one process, over every transport, and what all collectives must give.
#![allow(dead_code)] // each test file uses a part of it

use std::{net::TcpListener, sync::Arc, time::Duration};
use temper_comm::{Comm, HostWorld, Reduce, Result, Tcp, World, tcp, threads};
use temper_tensor::Tensor;

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

/// A value that no other rank and place has, exact in every type.
pub fn value(rank: usize, i: usize) -> f32 {
    (rank * 7 + i % 5) as f32 - 3.0
}

pub fn tensor(rank: usize, len: usize) -> Tensor {
    Tensor::from_vec((0..len).map(|i| value(rank, i)).collect::<Vec<f32>>(), &[len])
}

/// Every collective on buffers of about `4 n` elements, or `scale` times as many, against its definition.
pub fn check_collectives(comm: &dyn Comm, scale: usize) {
    let (n, rank) = (comm.size(), comm.rank());
    let part = 4 * scale;
    let len = part * n;
    // Lengths that do not divide are allowed where the whole result stays with everyone.
    for len in [0, 1, len, len + 1] {
        let mut x = tensor(rank, len);
        comm.all_reduce(x.view_mut(), Reduce::Sum).unwrap().wait().unwrap();
        let want: Vec<f32> = (0..len).map(|i| (0..n).map(|r| value(r, i)).sum()).collect();
        assert_eq!(x.as_slice::<f32>().unwrap(), want);
        let mut x = tensor(rank, len);
        comm.all_reduce(x.view_mut(), Reduce::Max).unwrap().wait().unwrap();
        let want: Vec<f32> = (0..len).map(|i| value(n - 1, i)).collect();
        assert_eq!(x.as_slice::<f32>().unwrap(), want);
    }
    let x = tensor(rank, len);
    let mut gathered = Tensor::from_vec(vec![0f32; n * len], &[n * len]);
    comm.all_gather(gathered.view_mut(), x.view()).unwrap().wait().unwrap();
    let want: Vec<f32> = (0..n).flat_map(|r| (0..len).map(move |i| value(r, i))).collect();
    assert_eq!(gathered.as_slice::<f32>().unwrap(), want);

    let mut out = Tensor::from_vec(vec![0f32; part], &[part]);
    comm.reduce_scatter(out.view_mut(), x.view()).unwrap().wait().unwrap();
    let own = rank * part..(rank + 1) * part;
    let want: Vec<f32> = own.clone().map(|i| (0..n).map(|r| value(r, i)).sum()).collect();
    assert_eq!(out.as_slice::<f32>().unwrap(), want);

    let mut x = tensor(rank, len);
    comm.reduce_scatter_in_place(x.view_mut()).unwrap().wait().unwrap();
    assert_eq!(x.as_slice::<f32>().unwrap()[own], want);
    comm.all_gather_in_place(x.view_mut()).unwrap().wait().unwrap();
    let want: Vec<f32> = (0..len).map(|i| (0..n).map(|r| value(r, i)).sum()).collect();
    assert_eq!(x.as_slice::<f32>().unwrap(), want);

    let mut x = tensor(rank, len);
    comm.broadcast(x.view_mut(), n - 1).unwrap().wait().unwrap();
    assert_eq!(x.as_slice::<f32>().unwrap(), tensor(n - 1, len).as_slice::<f32>().unwrap());
    comm.barrier().unwrap();
}

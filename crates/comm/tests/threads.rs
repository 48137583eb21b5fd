//! The collectives between threads, against what they are defined to give.

use std::{sync::Arc, time::Duration};
use temper_comm::{Axes, Comm, Error, Mesh, Reduce, World, threads};
use temper_tensor::{Tensor, View};

const PATIENCE: Duration = Duration::from_secs(20);

/// Runs `work` on every rank of a group of `n` threads and gives its results in the order of ranks.
fn on_all<T: Send>(n: usize, work: impl Fn(Arc<dyn Comm>, usize) -> T + Sync) -> Vec<T> {
    let worlds = threads(n, PATIENCE);
    std::thread::scope(|scope| {
        let work = &work;
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                scope.spawn(move || {
                    let members: Vec<usize> = (0..n).collect();
                    let rank = world.rank();
                    work(world.group("all", &members).unwrap(), rank)
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

/// A value that no other rank and place has, exact in every type.
fn value(rank: usize, i: usize) -> f32 {
    (rank * 7 + i % 5) as f32 - 3.0
}

fn tensor(rank: usize, len: usize) -> Tensor {
    Tensor::from_vec((0..len).map(|i| value(rank, i)).collect::<Vec<f32>>(), &[len])
}

#[test]
fn reductions_gathers_and_scatters_are_what_they_are_defined_to_be() {
    for n in [2, 3, 4] {
        let len = 4 * n;
        on_all(n, |comm, rank| {
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

            let mut part = Tensor::from_vec(vec![0f32; 4], &[4]);
            comm.reduce_scatter(part.view_mut(), x.view()).unwrap().wait().unwrap();
            let want: Vec<f32> = (rank * 4..rank * 4 + 4).map(|i| (0..n).map(|r| value(r, i)).sum()).collect();
            assert_eq!(part.as_slice::<f32>().unwrap(), want);

            let mut x = tensor(rank, len);
            comm.reduce_scatter_in_place(x.view_mut()).unwrap().wait().unwrap();
            assert_eq!(x.as_slice::<f32>().unwrap()[rank * 4..rank * 4 + 4], want);
            comm.all_gather_in_place(x.view_mut()).unwrap().wait().unwrap();
            let want: Vec<f32> = (0..len).map(|i| (0..n).map(|r| value(r, i)).sum()).collect();
            assert_eq!(x.as_slice::<f32>().unwrap(), want);

            let mut x = tensor(rank, len);
            comm.broadcast(x.view_mut(), n - 1).unwrap().wait().unwrap();
            assert_eq!(x.as_slice::<f32>().unwrap(), tensor(n - 1, len).as_slice::<f32>().unwrap());
            comm.barrier().unwrap();
        });
    }
}

#[test]
fn sixteen_bit_floats_are_added_in_f32_and_rounded_once() {
    use half::bf16;
    let sums = on_all(4, |comm, rank| {
        // 256 + 1 + 1 + 1 in bf16 arithmetic stays 256 (spacing 2); added in f32 and rounded once it is 260 (259 is a tie to even).
        let x = if rank == 0 { 256.0 } else { 1.0 };
        let mut x = Tensor::from_vec(vec![bf16::from_f32(x); 3], &[3]);
        comm.all_reduce(x.view_mut(), Reduce::Sum).unwrap().wait().unwrap();
        x.as_slice::<bf16>().unwrap()[0].to_f32()
    });
    assert_eq!(sums, [260.0; 4]);
}

#[test]
fn rows_go_where_the_counts_say() {
    // Rank r sends r + to rows to rank `to`, each row [r, to].
    let n = 3;
    on_all(n, |comm, rank| {
        let send: Vec<usize> = (0..n).map(|to| rank + to).collect();
        let receive: Vec<usize> = (0..n).map(|from| from + rank).collect();
        let rows: Vec<i32> = (0..n).flat_map(|to| [rank as i32, to as i32].repeat(send[to])).collect();
        let x = Tensor::from_vec(rows, &[send.iter().sum(), 2]);
        let total: usize = receive.iter().sum();
        let mut out = Tensor::from_vec(vec![0i32; total * 2], &[total, 2]);
        comm.all_to_all(out.view_mut(), &receive, x.view(), &send).unwrap().wait().unwrap();
        let want: Vec<i32> = (0..n).flat_map(|from| [from as i32, rank as i32].repeat(receive[from])).collect();
        assert_eq!(out.as_slice::<i32>().unwrap(), want);
    });
}

#[test]
fn messages_between_two_ranks_arrive_in_order_and_never_block_the_sender() {
    on_all(2, |comm, rank| {
        for i in 0..50 {
            comm.send(tensor(rank, i).view(), 1 - rank).unwrap().wait().unwrap();
        }
        for i in 0..50 {
            let mut x = tensor(9, i);
            comm.recv(x.view_mut(), 1 - rank).unwrap().wait().unwrap();
            assert_eq!(x.as_slice::<f32>().unwrap(), tensor(1 - rank, i).as_slice::<f32>().unwrap());
        }
    });
}

#[test]
fn a_rank_that_strays_ends_or_stays_silent_is_named() {
    let errors = on_all(2, |comm, rank| {
        if rank == 0 {
            return comm.barrier().map(|_| ()).unwrap_err().to_string();
        }
        let mut x = tensor(rank, 4);
        comm.all_reduce(x.view_mut(), Reduce::Sum).map(|_| ()).unwrap_err().to_string()
    });
    assert!(errors[0].contains("rank 0, barrier #0") && errors[0].contains("rank 1 is elsewhere: it is in all_reduce #0"), "{}", errors[0]);

    let gone = on_all(2, |comm, rank| if rank == 0 { comm.barrier().unwrap_err().to_string() } else { String::new() });
    assert!(gone[0].contains("rank 1 is gone: its thread ended"), "{}", gone[0]);

    let worlds = threads(2, Duration::from_millis(50));
    let comm = worlds[0].group("all", &[0, 1]).unwrap();
    let mut x = tensor(0, 1);
    let error = comm.recv(x.view_mut(), 1).map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Timeout { from: 1, .. }), "{error}");

    // Another size on another rank: found, not read as garbage.
    let sizes =
        on_all(2, |comm, rank| comm.all_reduce(tensor(rank, 4 + 2 * rank).view_mut(), Reduce::Sum).map(|_| ()).unwrap_err().to_string());
    assert!(sizes[0].contains("bytes"), "{}", sizes[0]);
}

/// A 16-rank layout with every axis in use: each group must consist of the ranks that Megatron's `RankGenerator` lists.
#[test]
fn a_mesh_has_megatrons_groups() {
    let axes = Axes { tp: 2, cp: 2, dp: 2, pp: 2, ep: 2, etp: 2 };
    let groups = |rank: usize| -> Vec<Vec<usize>> {
        let of = |comm: &Arc<dyn Comm>| {
            let mut all = Tensor::from_vec(vec![0i32; comm.size()], &[comm.size()]);
            let own = [rank as i32];
            comm.all_gather(all.view_mut(), View::host(&own, &[1])).unwrap().wait().unwrap();
            all.as_slice::<i32>().unwrap().iter().map(|r| *r as usize).collect::<Vec<_>>()
        };
        GROUPS.with_borrow(|mesh| {
            let m = mesh.as_ref().unwrap();
            [&m.tp, &m.cp, &m.tokens, &m.experts, &m.dp, &m.expert_dp, &m.ends].into_iter().map(of).collect()
        })
    };
    thread_local!(static GROUPS: std::cell::RefCell<Option<Mesh>> = const { std::cell::RefCell::new(None) });
    let worlds = threads(16, PATIENCE);
    let all: Vec<Vec<Vec<usize>>> = std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                let groups = &groups;
                scope.spawn(move || {
                    let mesh = Mesh::new(&world, axes, &[2]).unwrap();
                    assert_eq!(mesh.copies(2).unwrap().size(), 2);
                    assert_eq!((mesh.stage(), mesh.replica()), (world.rank() / 8, world.rank() / 4 % 2));
                    GROUPS.set(Some(mesh));
                    groups(world.rank())
                })
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    });
    // Rank 5 = tp 1, cp 0, dp 1, stage 0; rank 14 = tp 0, cp 1, dp 1, stage 1.
    let want_5: [&[usize]; 7] = [&[4, 5], &[5, 7], &[4, 5, 6, 7], &[4, 5, 6, 7], &[1, 3, 5, 7], &[1, 5], &[5, 13]];
    let want_14: [&[usize]; 7] = [&[14, 15], &[12, 14], &[12, 13, 14, 15], &[12, 13, 14, 15], &[8, 10, 12, 14], &[10, 14], &[6, 14]];
    assert_eq!(all[5], want_5);
    assert_eq!(all[14], want_14);
}

#[test]
fn a_line_leads_round_in_both_directions() {
    let pp = 3;
    let worlds = threads(pp, PATIENCE);
    std::thread::scope(|scope| {
        for world in worlds {
            scope.spawn(move || {
                let rank = world.rank();
                let mesh = Mesh::new(&world, Axes { pp, ..Axes::default() }, &[]).unwrap();
                for (line, from) in [(&mesh.forward, (rank + 2) % pp), (&mesh.backward, (rank + 1) % pp)] {
                    line.send(tensor(rank, 5).view()).unwrap().wait().unwrap();
                    let mut x = tensor(9, 5);
                    line.recv(x.view_mut()).unwrap().wait().unwrap();
                    assert_eq!(x.as_slice::<f32>().unwrap(), tensor(from, 5).as_slice::<f32>().unwrap());
                }
            });
        }
    });
}

//! The collectives over every transport between host memories, against what they are defined to give.

mod common;

use common::{PATIENCE, TRANSPORTS, check_collectives, on_all, tensor, worlds};
use std::{sync::Arc, time::Duration};
use temper_comm::{Axes, Comm, Error, Mesh, Reduce, World};
use temper_tensor::{Tensor, View};

#[test]
fn operations_are_what_they_are_defined_to_be() {
    for transport in TRANSPORTS {
        for n in [2, 3, 4] {
            on_all(transport, n, |comm, _| check_collectives(&*comm, 1));
        }
        // Messages of a megabyte, which no socket takes in one piece.
        on_all(transport, 3, |comm, _| check_collectives(&*comm, 20_000));
    }
}

#[test]
fn sixteen_bit_floats_are_added_in_f32_and_rounded_once() {
    use half::bf16;
    for transport in TRANSPORTS {
        let sums = on_all(transport, 4, |comm, rank| {
            // 256 + 1 + 1 + 1 in bf16 arithmetic stays 256 (spacing 2); added in f32 and rounded once it is 260 (259 is a tie to even).
            let x = if rank == 0 { 256.0 } else { 1.0 };
            let mut x = Tensor::from_vec(vec![bf16::from_f32(x); 3], &[3]);
            comm.all_reduce(x.view_mut(), Reduce::Sum).unwrap().wait().unwrap();
            x.as_slice::<bf16>().unwrap()[0].to_f32()
        });
        assert_eq!(sums, [260.0; 4]);
    }
}

#[test]
fn messages_between_two_ranks_arrive_in_order_and_never_block_the_sender() {
    for transport in TRANSPORTS {
        on_all(transport, 2, |comm, rank| {
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
}

#[test]
fn a_rank_that_strays_ends_or_stays_silent_is_named() {
    for transport in TRANSPORTS {
        let errors = on_all(transport, 2, |comm, rank| {
            if rank == 0 {
                return comm.barrier().map(|_| ()).unwrap_err().to_string();
            }
            let mut x = tensor(rank, 4);
            comm.all_reduce(x.view_mut(), Reduce::Sum).map(|_| ()).unwrap_err().to_string()
        });
        assert!(
            errors[0].contains("rank 0, barrier #0") && errors[0].contains("rank 1 is elsewhere: it is in all_reduce #0"),
            "{}",
            errors[0]
        );

        let gone = on_all(transport, 2, |comm, rank| if rank == 0 { comm.barrier().unwrap_err().to_string() } else { String::new() });
        assert!(gone[0].contains("rank 1 is gone: it"), "{}", gone[0]);

        let worlds = worlds(transport, 2, Duration::from_secs(1));
        let comm = worlds[0].group("all", &[0, 1]).unwrap();
        let mut x = tensor(0, 1);
        let error = comm.recv(x.view_mut(), 1).map(|_| ()).unwrap_err();
        assert!(matches!(error, Error::Timeout { from: 1, .. }), "{error}");

        // Another size on another rank: found, not read as garbage.
        let sizes = on_all(transport, 2, |comm, rank| {
            comm.all_reduce(tensor(rank, 4 + 2 * rank).view_mut(), Reduce::Sum).map(|_| ()).unwrap_err().to_string()
        });
        assert!(sizes[0].contains("bytes"), "{}", sizes[0]);
    }
}

/// A 16-rank layout with every axis in use: each group must consist of the ranks that Megatron's `RankGenerator` lists.
#[test]
fn a_mesh_has_megatrons_groups() {
    for transport in TRANSPORTS {
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
        let worlds = worlds(transport, 16, PATIENCE);
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
}

#[test]
fn a_line_leads_round_in_both_directions() {
    let pp = 3;
    for transport in TRANSPORTS {
        std::thread::scope(|scope| {
            for world in worlds(transport, pp, PATIENCE) {
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
}

//! Ranks and whole jobs that die at any moment of a save.

use super::ranks::*;
use std::{
    fs, io,
    path::PathBuf,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};
use temper_checkpoint::{Hook, Store};
use temper_comm::{Comm, Pending, Reduce};
use temper_tensor::{DType, View, ViewMut};
use tempfile::tempdir;

const LAYOUT: Layout = Layout { tp: 2, dp: 2, pp: 1, ep: 2, etp: 1, cuts: 21 };

/// A group that is gone, for this rank and in the eyes of the others, as soon as the flag is set.
struct Mortal {
    dead: Arc<AtomicBool>,
    inner: Mutex<Option<Arc<dyn Comm>>>,
    rank: usize,
    size: usize,
}

impl Mortal {
    fn alive(&self) -> temper_comm::Result<Arc<dyn Comm>> {
        let mut inner = self.inner.lock().unwrap();
        if self.dead.load(Ordering::SeqCst) {
            inner.take();
        }
        inner.clone().ok_or(temper_comm::Error::Transport("this rank was killed".into()))
    }
}

impl Comm for Mortal {
    fn rank(&self) -> usize {
        self.rank
    }
    fn size(&self) -> usize {
        self.size
    }
    fn all_reduce<'a>(&self, _: ViewMut<'a>, _: Reduce) -> temper_comm::Result<Pending<'a>> {
        unimplemented!()
    }
    fn all_gather<'a>(&self, _: ViewMut<'a>, _: View<'a>) -> temper_comm::Result<Pending<'a>> {
        unimplemented!()
    }
    fn all_gather_in_place<'a>(&self, _: ViewMut<'a>) -> temper_comm::Result<Pending<'a>> {
        unimplemented!()
    }
    fn reduce_scatter<'a>(&self, _: ViewMut<'a>, _: View<'a>) -> temper_comm::Result<Pending<'a>> {
        unimplemented!()
    }
    fn reduce_scatter_in_place<'a>(&self, _: ViewMut<'a>) -> temper_comm::Result<Pending<'a>> {
        unimplemented!()
    }
    fn all_to_all<'a>(&self, _: ViewMut<'a>, _: &[usize], _: View<'a>, _: &[usize]) -> temper_comm::Result<Pending<'a>> {
        unimplemented!()
    }
    fn broadcast<'a>(&self, _: ViewMut<'a>, _: usize) -> temper_comm::Result<Pending<'a>> {
        unimplemented!()
    }
    fn send<'a>(&self, x: View<'a>, to: usize) -> temper_comm::Result<Pending<'a>> {
        let comm = self.alive()?;
        comm.send(x, to)?.wait()?;
        Ok(Pending::done())
    }
    fn recv<'a>(&self, x: ViewMut<'a>, from: usize) -> temper_comm::Result<Pending<'a>> {
        let comm = self.alive()?;
        comm.recv(x, from)?.wait()?;
        Ok(Pending::done())
    }
    fn barrier(&self) -> temper_comm::Result<()> {
        unimplemented!()
    }
}

/// Saves step 6 with `victim` dying before its `limit`th change to the disk. Returns how many changes it made.
fn save_with_death(job: &Job, victim: usize, limit: usize) -> usize {
    let count = Arc::new(AtomicUsize::new(0));
    let start = Instant::now();
    let results = on_ranks(LAYOUT.ranks(), |comm| {
        let rank = comm.rank();
        let dead = Arc::new(AtomicBool::new(false));
        let mortal = Arc::new(Mortal { dead: dead.clone(), rank, size: comm.size(), inner: Mutex::new(Some(comm)) });
        let count = count.clone();
        let hook = Hook::new(move |_| {
            if rank == victim && count.fetch_add(1, Ordering::SeqCst) >= limit {
                dead.store(true, Ordering::SeqCst);
                return Err(io::Error::other("killed"));
            }
            Ok(())
        });
        job.save_rank(Arc::new(job.store().with_hook(hook)), mortal, &LAYOUT, 6, &|_, _| ())
    });
    assert!(start.elapsed() < Duration::from_secs(10), "the others learn of a death at once");
    if count.load(Ordering::SeqCst) > limit {
        assert!(results[victim].is_err());
        for (rank, result) in results.iter().enumerate().filter(|r| r.0 != victim) {
            let error = result.as_ref().expect_err("a rank that cannot know of the commit").to_string();
            assert!(error.contains(&format!("rank {victim}")), "rank {rank}: {error}");
        }
    }
    count.load(Ordering::SeqCst)
}

#[test]
fn a_rank_that_dies_at_any_operation_costs_nothing() {
    for victim in [0, 1, 3] {
        let probe = tempdir().unwrap();
        let probe = Job::new(probe.path(), arch(false, true, 20), DType::F32);
        let all = save_with_death(&probe, victim, usize::MAX);
        assert!(all > 5);
        let mut committed = 0;
        for limit in 0..all {
            let root = tempdir().unwrap();
            let job = Job::new(root.path(), arch(false, true, 20), DType::F32);
            job.save(&LAYOUT, 3).into_iter().for_each(|r| drop(r.unwrap()));
            save_with_death(&job, victim, limit);
            let (step, _) = job.resume(&LAYOUT).unwrap().expect("a checkpoint");
            assert!(step == 3 || step == 6 && victim == 0, "{step}");
            committed += usize::from(step == 6);
            // The next job finds its way, and nothing stays behind.
            job.save(&LAYOUT, 9).into_iter().for_each(|r| drop(r.unwrap()));
            job.store().prune(0, 0).unwrap();
            let hidden = fs::read_dir(job.store().dir())
                .unwrap()
                .filter(|e| e.as_ref().unwrap().file_name().to_string_lossy().starts_with('.'))
                .count();
            assert_eq!(hidden, 0);
            assert!(job.assert_resumes(&LAYOUT, 9).is_empty());
        }
        assert!(committed <= 2, "{committed}");
    }
}

const RUN: &str = "TEMPER_TEST_KILLED_RUN";

/// The whole job as a process, killed by the system at any moment.
#[test]
fn a_job_killed_at_any_moment_goes_on_from_a_whole_checkpoint() {
    let root = tempdir().unwrap();
    let job = Job::new(root.path(), arch(false, true, 3000), DType::F32);
    let exe = std::env::current_exe().unwrap();
    let mut newest = 0;
    for round in 0..6u64 {
        let mut child = Command::new(&exe)
            .args(["--exact", "killed::endless_child", "--ignored"])
            .env(RUN, root.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Until it has saved something new, and a bit of the next save.
        let end = Instant::now() + Duration::from_secs(30);
        while latest(&job.store()) <= newest && Instant::now() < end {
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(7 * round));
        child.kill().unwrap();
        child.wait().unwrap();
        let (step, notices) = job.resume(&LAYOUT).unwrap().expect("a checkpoint");
        assert!(step > newest, "{step} after {newest}");
        assert!(notices.iter().all(|n| n.contains("left behind")), "{notices:?}");
        newest = step;
    }
}

fn latest(store: &Store) -> usize {
    store.list().unwrap().last().map_or(0, |l| l.step)
}

#[test]
#[ignore = "the child of another test"]
fn endless_child() {
    let root = PathBuf::from(std::env::var_os(RUN).unwrap());
    let job = Job::new(&root, arch(false, true, 3000), DType::F32);
    job.store().prune(0, 0).unwrap();
    let first = latest(&job.store()) + 1;
    let end = Instant::now() + Duration::from_secs(60);
    for step in first.. {
        job.save(&LAYOUT, step).into_iter().for_each(|r| drop(r.unwrap()));
        if Instant::now() > end {
            return;
        }
    }
}

//! Checks NCCL on a machine with two GPUs: every operation on every group of a layout, the order of streams, and what happens when a
//! rank hangs or is killed. `nccl_check [threads] [processes] [hang] [killed]`; exit code 1 when anything is off.
//!
//! `threads`: two ranks in this process; `processes`: two processes over TCP; `hang`, `killed`: the same with a rank that fails.

#[path = "../../../comm/tests/common/collectives.rs"]
mod collectives;

use collectives::{Numbers, check_collectives};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};
use temper_comm::{Axes, Comm, HostWorld, Mesh, Reduce, Tcp, World, tcp, threads};
use temper_cuda::nccl::{ENVIRONMENT, NcclWorld};
use temper_cuda::{Cuda, Options};
use temper_tensor::{DType, Ops, Tensor};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const PATIENCE: Duration = Duration::from_secs(30);
/// For the checks that wait for it to pass.
const SHORT: Duration = Duration::from_secs(5);

fn open(rank: usize, host: HostWorld) -> Result<(Arc<Cuda>, NcclWorld)> {
    let gpu = Arc::new(Cuda::open(Options { ordinal: rank, ..Options::default() })?);
    let begun = Instant::now();
    let world = NcclWorld::open(gpu.device(), host)?;
    println!("rank {rank}: joined in {:.2} s", begun.elapsed().as_secs_f64());
    Ok((gpu, world))
}

/// Everything that must work, on one rank.
fn work(rank: usize, host: HostWorld) -> Result<()> {
    let (gpu, world) = open(rank, host)?;
    let ops: &dyn Ops = &*gpu;
    for axes in [Axes { tp: 2, ..Axes::default() }, Axes { pp: 2, ..Axes::default() }, Axes { dp: 2, ep: 2, ..Axes::default() }] {
        let begun = Instant::now();
        let mesh = Mesh::new(&world, axes, &[])?;
        let made = begun.elapsed().as_secs_f64();
        for comm in [&mesh.world, &mesh.tp, &mesh.dp, &mesh.experts, mesh.forward.next(), mesh.backward.next(), &mesh.ends] {
            if comm.size() == 2 {
                check_collectives(&**comm, ops, 1);
                check_collectives(&**comm, ops, 100_000);
            }
        }
        if axes.pp == 2 {
            pipeline(rank, &mesh, ops)?;
        }
        if axes.tp == 2 {
            order(rank, &*mesh.tp, ops)?;
            host_time(&*mesh.tp, ops)?;
        }
        println!("rank {rank}: {axes:?} right; groups made in {made:.2} s");
    }
    Ok(())
}

/// Two stages that send forward and backward at once, in the order of 1F1B: what would lock on one handle.
fn pipeline(rank: usize, mesh: &Mesh, ops: &dyn Ops) -> Result<()> {
    const LEN: usize = 8 << 20; // 32 MiB, beyond NCCL's own buffers
    let numbers = Numbers { ops, dtype: DType::F32 };
    let make = |x: f64| -> Result<Tensor> {
        let mut t = ops.alloc(DType::F32, &[LEN])?;
        ops.fill(t.view_mut(), x)?;
        Ok(t)
    };
    let micro_batches = 8;
    let mut sent = vec![];
    for i in 0..micro_batches {
        if rank == 0 {
            let out = make(i as f64)?;
            sent.push((mesh.forward.send(out.view())?.detach(), out));
            if i > 0 {
                let mut back = make(-1.0)?;
                mesh.backward.recv(back.view_mut())?.wait()?;
                assert_eq!(numbers.down(back.view().slice_rows(LEN - 1..LEN)), [2.0 * (i - 1) as f64]);
            }
        } else {
            let mut x = make(-1.0)?;
            mesh.forward.recv(x.view_mut())?.wait()?;
            ops.scale(x.view_mut(), 2.0)?;
            sent.push((mesh.backward.send(x.view())?.detach(), x));
        }
    }
    if rank == 0 {
        let mut back = make(-1.0)?;
        mesh.backward.recv(back.view_mut())?.wait()?;
    }
    for (pending, buffer) in sent {
        pending.wait()?;
        drop(buffer);
    }
    ops.wait()?;
    Ok(())
}

/// Computation and exchange in turn without the host waiting: any step out of order changes the result.
fn order(rank: usize, comm: &dyn Comm, ops: &dyn Ops) -> Result<()> {
    const LEN: usize = 16 << 20;
    let mut x = ops.alloc(DType::F32, &[LEN])?;
    let y = {
        let mut y = ops.alloc(DType::F32, &[LEN])?;
        ops.fill(y.view_mut(), 1.0)?;
        y
    };
    ops.fill(x.view_mut(), (rank + 1) as f64)?; // 1 and 2
    let steps = 50;
    for _ in 0..steps {
        ops.add_assign(x.view_mut(), y.view())?;
        comm.all_reduce(x.view_mut(), Reduce::Sum)?.wait()?;
        ops.scale(x.view_mut(), 0.5)?;
    }
    // The mean of both ranks grows by one each time.
    let numbers = Numbers { ops, dtype: DType::F32 };
    for at in [0, LEN / 2, LEN - 1] {
        assert_eq!(numbers.down(x.view().slice_rows(at..at + 1)), [1.5 + f64::from(steps)]);
    }
    // An operation that nobody waits for must still be over before its buffer is given away.
    for _ in 0..20 {
        let mut t = ops.alloc(DType::F32, &[LEN])?;
        ops.fill(t.view_mut(), 1.0)?;
        drop(comm.all_reduce(t.view_mut(), Reduce::Sum)?);
        drop(t);
        let mut other = ops.alloc(DType::F32, &[LEN])?;
        ops.fill(other.view_mut(), 5.0)?;
        assert_eq!(numbers.down(other.view().slice_rows(LEN - 1..LEN)), [5.0]);
    }
    Ok(())
}

/// What an operation costs the host.
fn host_time(comm: &dyn Comm, ops: &dyn Ops) -> Result<()> {
    let mut x = ops.zeros(DType::F32, &[1024])?;
    comm.all_reduce(x.view_mut(), Reduce::Sum)?.wait()?;
    ops.wait()?;
    let begun = Instant::now();
    for _ in 0..1000 {
        comm.all_reduce(x.view_mut(), Reduce::Sum)?.wait()?;
    }
    let enqueued = begun.elapsed();
    ops.wait()?;
    let done = begun.elapsed();
    if comm.rank() == 0 {
        println!("all_reduce of 4 KiB: {:.1} us of the host, {:.1} us in all", enqueued.as_secs_f64() * 1e3, done.as_secs_f64() * 1e3);
    }
    Ok(())
}

/// Rank 1 does not call the second operation (and is killed meanwhile, or not); rank 0 must say so, soon, and not hang in its wait.
fn fail(rank: usize, host: HostWorld) -> Result<()> {
    let (gpu, world) = open(rank, host)?;
    let ops: &dyn Ops = &*gpu;
    let comm = world.group("tp", &[0, 1])?;
    let mut x = ops.zeros(DType::F32, &[1 << 20])?;
    comm.all_reduce(x.view_mut(), Reduce::Sum)?.wait()?;
    ops.wait()?;
    if rank == 1 {
        println!("rank 1 stands still");
        std::thread::sleep(Duration::from_secs(120));
        return Ok(());
    }
    let begun = Instant::now();
    comm.all_reduce(x.view_mut(), Reduce::Sum)?.wait()?;
    ops.wait()?; // returns when the watchdog has aborted
    let returned = begun.elapsed();
    let error = comm.barrier().err().ok_or("no error")?;
    println!("after {:.1} s, {:.1} s: {error}", returned.as_secs_f64(), begun.elapsed().as_secs_f64());
    let text = error.to_string();
    let again = comm.all_reduce(x.view_mut(), Reduce::Sum).map(drop).err().ok_or("a call after the failure succeeded")?.to_string();
    let right = text.contains("rank 0, all_reduce #1 of group tp (ranks [0, 1])") && text.contains("rank 1") && again == text;
    if right { Ok(()) } else { Err(format!("not the right error: {text}; then {again}").into()) }
}

fn join(rank: usize, master: &str, patience: Duration) -> Result<HostWorld> {
    Ok(tcp(&Tcp { rank, size: 2, master, job: "nccl_check", fingerprint: "", announce: None, patience })?)
}

fn worker(mode: &str, rank: usize, master: &str) -> Result<()> {
    let host = join(rank, master, if mode == "hang" { SHORT } else { PATIENCE })?;
    if mode == "processes" { work(rank, host) } else { fail(rank, host) }
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs both ranks as processes.
fn processes(mode: &str) -> Result<()> {
    let master = std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let start = |rank: usize| -> Result<Killed> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["worker", mode, &rank.to_string(), &master]);
        for (key, value) in ENVIRONMENT {
            if std::env::var_os(key).is_none() {
                command.env(key, value);
            }
        }
        Ok(Killed(command.spawn()?))
    };
    let (mut first, mut second) = (start(0)?, start(1)?);
    if mode == "killed" {
        std::thread::sleep(Duration::from_secs(15)); // both stand in position by then
        println!("rank 1 is killed");
        second.0.kill()?;
    }
    let deadline = Instant::now() + Duration::from_secs(100);
    while first.0.try_wait()?.is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    let status = first.0.try_wait()?.ok_or("rank 0 hangs")?;
    if !status.success() {
        return Err(format!("rank 0: {status}").into());
    }
    if mode == "processes" && !second.0.wait()?.success() {
        return Err("rank 1 failed".into());
    }
    Ok(())
}

fn in_threads() -> Result<()> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> = threads(2, PATIENCE).into_iter().map(|host| scope.spawn(move || work(host.rank(), host))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().map_err(|_| "a rank panicked")?)
    })
}

fn run() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let [word, mode, rank, master] = words.as_slice()
        && word == "worker"
    {
        return worker(mode, rank.parse()?, master);
    }
    for mode in words {
        let begun = Instant::now();
        if mode == "threads" {
            in_threads()?
        } else {
            processes(&mode)?
        }
        println!("{mode}: good, {:.1} s", begun.elapsed().as_secs_f64());
    }
    Ok(())
}

fn main() {
    if let Err(e) = run() {
        println!("FAILED: {e}");
        std::process::exit(1);
    }
}

//! Who does what of a job: `temper sft` as the only rank, as one of many, or as their supervisor; and `temper launch`.

use crate::args::{self, Cli, Sft};
use crate::backend::gpus;
use crate::exit::{BadInput, Told};
use crate::layout;
use crate::out::{Stdout, tell};
use crate::rank::{self, Rank};
use crate::sft;
use std::{
    io::{self, IsTerminal},
    path::PathBuf,
    process::Command,
    sync::{Arc, Mutex, mpsc::Receiver},
    time::Duration,
};
use temper_checkpoint::Store;
use temper_cluster::launch::{LAUNCHED, Launch, launched};
use temper_cluster::{Patience, Rendezvous, SUPERVISOR, Screen, Seat, Stop, Supervisor, Workers, hosts};
use temper_config::{Config, Parallel};

/// Most workers of a host.
const MOST_HERE: usize = 1024;

/// What this process is in its job.
#[derive(Debug, PartialEq, Eq)]
enum Role {
    /// One rank, and no supervisor.
    Rank(Rendezvous),
    /// The only rank.
    Only,
    /// A supervisor of so many ranks: node, nodes and address of rank 0 where there are several.
    Supervisor { here: usize, world: Option<usize>, node: Option<Rendezvous> },
}

/// `temper sft`, whatever this process is in it. `work` trains as one rank.
pub fn sft(args: &Sft, cli: &Cli, work: impl Fn(&Rank) -> anyhow::Result<()>) -> anyhow::Result<()> {
    if std::env::var_os(SUPERVISOR).is_some() {
        return rank::supervised(work);
    }
    let mut resolved = Config::load(&args.config, &args.sets)?;
    let found = Rendezvous::from_env().map_err(temper_cluster::Error::from)?;
    let launched = std::env::var_os(LAUNCHED).is_some();
    match role(args, &resolved.config.parallel, found, launched, gpus(cli))? {
        Role::Only => work(&Rank::only()),
        Role::Rank(me) => {
            let rank = Rank::unsupervised(me);
            work(&rank).inspect_err(|e| rank.give_up(e))
        }
        Role::Supervisor { here, world, node } => {
            // The ranks do the same; here it is told once, and before any of them begins.
            if let Some(world) = world {
                layout::settle(&mut resolved, world, &layout::place(cli, here)?)?;
            }
            supervise(args, &resolved.config, here, world, node, launched)
        }
    }
}

/// What this process is: by its environment, the layout and the arguments.
fn role(args: &Sft, parallel: &Parallel, found: Option<Rendezvous>, launched: bool, gpus: usize) -> Result<Role, BadInput> {
    let fixed = parallel.tp * parallel.cp * parallel.pp;
    let per_node = args.ranks_per_node.map(|n| n as usize);
    let world = args.ranks.map(|n| n as usize).or(parallel.dp.map(|dp| dp * fixed));
    let node = |here, node| Role::Supervisor { here, world, node };
    match found.filter(|f| f.size > 1 || launched) {
        Some(me) if per_node.is_some() || launched => {
            let share = world.filter(|world| world.is_multiple_of(me.size)).map(|world| world / me.size);
            Ok(node(per_node.or(share).unwrap_or(gpus.max(1)), Some(me)))
        }
        Some(me) => match world {
            None if me.size.is_multiple_of(fixed) => Ok(Role::Rank(me)),
            Some(world) if world == me.size => Ok(Role::Rank(me)),
            Some(world) if world > me.size && world.is_multiple_of(me.size) => Ok(node(world / me.size, Some(me))),
            _ => {
                let needs = world.map_or_else(|| format!("a multiple of {fixed}"), |world| world.to_string());
                let what = format!("the launcher started {} processes, but [parallel] needs {needs} ranks", me.size);
                Err(BadInput(format!("{what}. Start one process a rank, or one a node with --ranks-per-node")))
            }
        },
        None => {
            let here = per_node.or(world).unwrap_or_else(|| fixed * (gpus / fixed).max(1));
            if let Some(world) = world.filter(|world| *world != here) {
                return Err(BadInput(format!("--ranks-per-node {here}, but the job has {world} ranks and only this node")));
            }
            let supervised = here > 1 || args.restarts > 0;
            Ok(if supervised { Role::Supervisor { here, world: Some(here), node: None } } else { Role::Only })
        }
    }
}

fn supervise(
    args: &Sft,
    config: &Config,
    here: usize,
    world: Option<usize>,
    node: Option<Rendezvous>,
    launched_: bool,
) -> anyhow::Result<()> {
    let (stop, stops) = Stop::new();
    let press = stop.clone();
    ctrlc::set_handler(move || press.press())?;
    let seat = match node {
        None => Seat::Only,
        Some(me) => {
            let token = if launched_ { launched(stop)? } else { shared_token(&me) };
            let master = host_and_port(&me.master)?;
            match me.rank {
                0 => Seat::First { nodes: me.size, master, token },
                node => Seat::Other { node, master, token },
            }
        }
    };
    let run = config.log.dir.clone();
    let store = Store::new(&run);
    run_supervisor(
        Supervisor {
            seat,
            workers: workers(here, run.join("logs"))?,
            world,
            restarts: args.restarts as usize,
            patience: Patience { silence: Duration::from_secs(args.silence.into()), ..Patience::default() },
            screen: screen(),
            resumable: Box::new(move || store.list().is_ok_and(|all| all.iter().any(|c| c.fault.is_none()))),
        },
        &stops,
    )?;
    sft::tell_what_is_lost(config);
    Ok(())
}

/// Runs this command line as `ranks` processes of this host that need no run folder; in each of them does `work`. A Ctrl-C ends it at
/// once, and the ranks with it.
pub fn on_this_host(ranks: usize, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    if std::env::var_os(SUPERVISOR).is_some() {
        return rank::supervised(|_| work());
    }
    let (_never, stops) = Stop::new();
    run_supervisor(
        Supervisor {
            seat: Seat::Only,
            workers: workers(ranks, std::env::temp_dir())?,
            world: Some(ranks),
            restarts: 0,
            patience: Patience::default(),
            screen: screen(),
            resumable: Box::new(|| false),
        },
        &stops,
    )
}

/// This program with its arguments, `count` times.
fn workers(count: usize, logs: PathBuf) -> anyhow::Result<Workers> {
    if count > MOST_HERE {
        return Err(BadInput(format!("{count} ranks: one host starts at most {MOST_HERE}")).into());
    }
    Ok(Workers {
        program: std::env::current_exe()?,
        arguments: std::env::args_os().skip(1).collect(),
        variables: temper_cuda::nccl::ENVIRONMENT.map(|(name, value)| (name.into(), value.into())).into(),
        count,
        logs,
        device_free: Box::new(device_free),
    })
}

fn run_supervisor(supervisor: Supervisor, stops: &Receiver<()>) -> anyhow::Result<()> {
    match supervisor.run(stops)? {
        0 => Ok(()),
        code => Err(Told(code).into()),
    }
}

fn screen() -> Screen {
    Screen { out: Arc::new(Mutex::new(Stdout)), err: Arc::new(Mutex::new(io::stderr())), terminal: io::stderr().is_terminal() }
}

/// What the supervisors of a job that no launcher of ours started have in common, and those of another job on these hosts do not.
fn shared_token(me: &Rendezvous) -> String {
    format!("{}/{}", me.master, std::env::var("SLURM_JOB_ID").unwrap_or_default())
}

fn host_and_port(master: &str) -> Result<(String, u16), BadInput> {
    let parts = master.rsplit_once(':').and_then(|(host, port)| Some((host.trim_matches(['[', ']']).to_string(), port.parse().ok()?)));
    parts.ok_or_else(|| BadInput(format!("{master} is no address of rank 0: give MASTER_ADDR and MASTER_PORT")))
}

/// Free bytes of a local rank's GPU, as nvidia-smi tells them: asking CUDA would itself take memory.
fn device_free(local_rank: usize) -> Option<u64> {
    let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok().filter(|v| !v.is_empty());
    let id = match &visible {
        Some(list) => list.split(',').nth(local_rank)?.trim().to_string(),
        None => local_rank.to_string(),
    };
    let asked = Command::new("nvidia-smi").args(["--query-gpu=memory.free", "--format=csv,noheader,nounits", "-i", &id]).output().ok()?;
    let mib: u64 = String::from_utf8(asked.stdout).ok()?.trim().parse().ok()?;
    Some(mib << 20)
}

/// `temper launch`
pub fn launch(args: &args::Launch) -> anyhow::Result<()> {
    match args.command.first() {
        Some(first) if first == "sft" => {}
        other => {
            let found = other.map_or("nothing".to_string(), |o| format!("{:?}", o.display().to_string()));
            return Err(BadInput(format!("after `--` comes `sft CONFIG.toml ...`, not {found}")).into());
        }
    }
    let launch = Launch {
        hosts: hosts::read(&args.hostfile)?,
        per_node: args.ranks_per_node.map(|n| n as usize),
        ssh: args.ssh.split_whitespace().map(Into::into).collect(),
        port: args.port,
        program: std::env::current_exe()?,
        arguments: args.command.clone(),
        folder: std::env::current_dir()?,
        variables: std::env::vars().filter(|(name, _)| is_of_the_job(name)).collect(),
    };
    let (stop, stops) = Stop::new();
    ctrlc::set_handler(move || stop.press())?;
    match launch.run(&screen(), &stops)? {
        0 => {
            if let Some(why) = Stdout::lost() {
                tell(format_args!(
                    "warning: standard output could not be written: {why}. The job itself is complete: all is in its run folder"
                ));
            }
            Ok(())
        }
        code => Err(Told(code).into()),
    }
}

/// Variables that every host must have alike. Not the Hub's token: every user of a host can read its command lines.
fn is_of_the_job(name: &str) -> bool {
    let one = ["LD_LIBRARY_PATH", "TEMPER_LOG", "XDG_CACHE_HOME", "NO_COLOR"];
    name.starts_with("NCCL_") || (name.starts_with("HF_") && name != "HF_TOKEN") || one.contains(&name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::path::Path;

    /// What `temper sft ARGUMENTS` is under a launcher that started `found` (rank, processes), on a host with so many GPUs.
    fn role_of(arguments: &str, parallel: &str, found: Option<(usize, usize)>, launched: bool, gpus: usize) -> Result<Role, String> {
        let cli = args::Cli::parse_from(format!("temper sft c.toml {arguments}").split_whitespace());
        let args::Command::Sft(sft) = cli.command else { panic!() };
        let text = format!("model.path = \"a/b\"\ndata.train = [\"Cargo.toml\"]\n[parallel]\n{parallel}");
        let config = Config::from_toml(&text, &Path::new(env!("CARGO_MANIFEST_DIR")).join("c.toml"), &[]).unwrap().config;
        role(&sft, &config.parallel, found.map(process), launched, gpus).map_err(|e| e.0)
    }

    fn process((rank, size): (usize, usize)) -> Rendezvous {
        Rendezvous { rank, size, local_rank: 0, master: "a:1".into() }
    }

    fn supervisor(here: usize, world: Option<usize>, node: Option<(usize, usize)>) -> Result<Role, String> {
        Ok(Role::Supervisor { here, world, node: node.map(process) })
    }

    #[test]
    fn alone_a_process_supervises_the_ranks_of_the_layout_or_of_the_gpus() {
        let alone = |arguments: &str, parallel: &str, gpus| role_of(arguments, parallel, None, false, gpus);
        assert_eq!(alone("", "", 0), Ok(Role::Only));
        assert_eq!(alone("", "", 1), Ok(Role::Only));
        assert_eq!(alone("", "", 8), supervisor(8, Some(8), None));
        assert_eq!(alone("", "tp=2", 0), supervisor(2, Some(2), None));
        assert_eq!(alone("", "tp=3", 8), supervisor(6, Some(6), None));
        assert_eq!(alone("", "tp=2\ndp=2", 8), supervisor(4, Some(4), None));
        assert_eq!(alone("--ranks 4", "tp=2", 0), supervisor(4, Some(4), None));
        assert_eq!(alone("--restarts 2", "", 0), supervisor(1, Some(1), None));
        assert_eq!(alone("--ranks 3", "tp=2", 0), supervisor(3, Some(3), None), "`layout::settle` refuses it");
        assert!(alone("--ranks-per-node 2 --ranks 4", "", 0).unwrap_err().contains("only this node"));
    }

    #[test]
    fn under_a_launcher_a_process_is_a_rank_or_a_node() {
        let found = Some((1, 4));
        assert_eq!(role_of("", "tp=2\ndp=2", found, false, 8), Ok(Role::Rank(process((1, 4)))));
        assert_eq!(role_of("", "", found, false, 8), Ok(Role::Rank(process((1, 4)))));
        assert_eq!(role_of("", "dp=32", found, false, 8), supervisor(8, Some(32), found));
        assert_eq!(role_of("--ranks 8", "", found, false, 0), supervisor(2, Some(8), found));
        assert_eq!(role_of("--ranks-per-node 8", "", found, false, 0), supervisor(8, None, found));
        assert_eq!(role_of("", "", Some((0, 1)), false, 8), supervisor(8, Some(8), None), "srun with one task is no launcher");
        assert_eq!(role_of("", "", found, true, 8), supervisor(8, None, found));
        assert_eq!(role_of("", "dp=8", found, true, 0), supervisor(2, Some(8), found));
        assert_eq!(role_of("", "", Some((0, 1)), true, 8), supervisor(8, None, Some((0, 1))));
        let error = role_of("", "dp=6", found, false, 8).unwrap_err();
        assert!(error.contains("started 4 processes, but [parallel] needs 6 ranks"), "{error}");
        assert!(role_of("", "tp=3", found, false, 8).unwrap_err().contains("a multiple of 3"));
    }

    #[test]
    fn a_secret_is_not_put_on_a_command_line() {
        assert!(["NCCL_DEBUG", "HF_HOME", "HF_ENDPOINT", "LD_LIBRARY_PATH"].into_iter().all(is_of_the_job));
        assert!(!["HF_TOKEN", "PATH", "HOME"].into_iter().any(is_of_the_job));
    }

    #[test]
    fn addresses_are_taken_apart() {
        assert_eq!(host_and_port("gpu-1:29500").unwrap(), ("gpu-1".into(), 29500));
        assert_eq!(host_and_port("[fd00::1]:5").unwrap(), ("fd00::1".into(), 5));
        assert!(host_and_port("gpu-1").is_err());
    }
}

//! Two hosts on one machine: network namespaces. Tests of several crates include this file (`#[path]`).
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::process::{Command, Stdio};

/// Network namespaces that stand for hosts, removed when their test ends.
pub struct Hosts {
    /// Names, as `ip netns exec` takes them.
    pub names: [String; 2],
}

impl Hosts {
    /// Two hosts with a cable between them, at 10.77.`net`.1 and 10.77.`net`.2; the error says why there are none.
    pub fn two(net: u8) -> Result<Hosts, String> {
        let id = std::process::id() % 100_000;
        let hosts = Hosts { names: [format!("temper-a{id}"), format!("temper-b{id}")] };
        let [a, b] = &hosts.names;
        for command in [
            format!("netns add {a}"),
            format!("netns add {b}"),
            format!("link add veth{id} netns {a} type veth peer name veth{id} netns {b}"),
            format!("-n {a} addr add 10.77.{net}.1/24 dev veth{id}"),
            format!("-n {b} addr add 10.77.{net}.2/24 dev veth{id}"),
            format!("-n {a} link set veth{id} up"),
            format!("-n {b} link set veth{id} up"),
            format!("-n {a} link set lo up"),
            format!("-n {b} link set lo up"),
        ] {
            let output = Command::new("ip").args(command.split(' ')).output().map_err(|e| format!("ip: {e}"))?;
            if !output.status.success() {
                return Err(format!("ip {command}: {}", String::from_utf8_lossy(&output.stderr).trim()));
            }
        }
        Ok(hosts)
    }

    /// Pulls the cable out of the second host.
    pub fn cut(&self) {
        let cable = format!("veth{}", std::process::id() % 100_000);
        assert!(Command::new("ip").args(["-n", &self.names[1], "link", "set", &cable, "down"]).status().unwrap().success());
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        for host in &self.names {
            let _ = Command::new("ip").args(["netns", "del", host]).stderr(Stdio::null()).status();
        }
    }
}

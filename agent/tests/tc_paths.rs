//! Which class packets take: counted by the kernel, on a real veth, for IPv4 and IPv6.
#![allow(clippy::print_stdout, clippy::unwrap_used, missing_docs)]

mod tc_common;

use flexcomm_agent::tc::Shaper;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;
use tc_common::{Net, can_make_namespaces, sh, shape};

const BULK: &str = "fc01:10";
const CONTROL: &str = "fc01:20";
const ECHO: &str = "fc01:30";
/// Enough to stand out from neighbour discovery.
const PACKETS: u64 = 40;

/// Packets sent by a class so far.
fn sent(net: &Net, class: &str) -> u64 {
    let all = net.tc(&["-s", "class", "show", "dev", "v0"]);
    let mut lines = all.lines().skip_while(|line| !line.contains(&format!("htb {class} ")));
    let line = lines.nth(1).unwrap_or_else(|| panic!("no {class} in {all}"));
    let words: Vec<&str> = line.split_whitespace().collect();
    words[words.iter().position(|word| *word == "pkt").unwrap() - 1].parse().unwrap()
}

/// Runs `traffic` in the shaped namespace and asserts that its packets took `class` and no other.
fn takes(net: &Net, class: &str, what: &str, traffic: impl FnOnce() + Send) {
    let count = || [BULK, CONTROL, ECHO].map(|class| sent(net, class));
    let before = count();
    net.within(traffic);
    let after = count();
    for ((name, before), after) in [BULK, CONTROL, ECHO].iter().zip(before).zip(after) {
        let more = after - before;
        match *name == class {
            true => assert!(more >= PACKETS, "{what}: {more} packets took {name}"),
            false => assert!(more < PACKETS, "{what}: {more} packets took {name}, not {class}"),
        }
    }
}

fn udp(to: SocketAddr, from_port: u16) {
    let any: SocketAddr = if to.is_ipv4() { ([0, 0, 0, 0], from_port).into() } else { ([0u16; 8], from_port).into() };
    let socket = UdpSocket::bind(any).unwrap();
    for _ in 0..PACKETS {
        // Nobody listens: the refusal of one datagram is told at the next.
        let _ = socket.send_to(&[0; 32], to);
    }
}

fn tcp(to: SocketAddr) {
    for _ in 0..PACKETS / 2 {
        drop(TcpStream::connect_timeout(&to, Duration::from_secs(5)).unwrap());
    }
}

#[test]
fn packets_take_the_class_they_belong_to() {
    if !can_make_namespaces() {
        return;
    }
    for (bound, other) in [("10.99.0.2", "10.99.0.3"), ("fd99::2", "fd99::3")] {
        let net = Net::new();
        for (namespace, device, address) in
            [(&net.name, "v0", "fd99::1/64"), (&net.peer, "v1", "fd99::2/64"), (&net.peer, "v1", "fd99::3/64")]
        {
            sh("ip", &["-n", namespace, "addr", "add", address, "dev", device, "nodad"]);
        }
        sh("ip", &["-n", &net.peer, "addr", "add", "10.99.0.3/24", "dev", "v1"]);
        let at = |address: &str, port: u16| SocketAddr::new(address.parse().unwrap(), port);
        let v6 = bound.contains(':');
        let any = if v6 { "::" } else { "0.0.0.0" };
        let listeners = net.within_peer(|| [7070, 7999].map(|port| TcpListener::bind(at(any, port)).unwrap()));
        let mut config = net.config();
        config.controller = Some(at(bound, 7070));
        let mut shaper = net.within(|| {
            let mut shaper = Shaper::new(config).unwrap();
            shaper.apply("v0", &shape(0.0, 0.0, 0.0, 1000.0)).unwrap();
            shaper
        });
        takes(&net, CONTROL, "TCP to the controller", || tcp(at(bound, 7070)));
        takes(&net, BULK, "TCP to another port of its host", || tcp(at(bound, 7999)));
        takes(&net, BULK, "TCP to its port on another host", || tcp(at(other, 7070)));
        takes(&net, BULK, "UDP to the controller's port", || udp(at(bound, 7070), 0));
        takes(&net, ECHO, "UDP to the echo port", || udp(at(other, 7071), 0));
        takes(&net, ECHO, "UDP from the echo port", || udp(at(other, 9999), 7071));
        takes(&net, BULK, "UDP to any port", || udp(at(other, 9999), 0));
        let ping = |tos: &str| {
            let count = PACKETS.to_string();
            sh("ping", &["-q", "-c", &count, "-i", "0.002", "-Q", tos, bound]);
        };
        takes(&net, ECHO, "ping with DSCP CS6", || ping("0xc0"));
        takes(&net, BULK, "ping", || ping("0"));
        net.within(|| shaper.restore().unwrap());
        drop(listeners);
        println!("{}: every kind of packet took its class", if v6 { "IPv6" } else { "IPv4" });
    }
}

/// The answers of a controller that runs on the shaped node itself.
#[test]
fn what_the_controller_sends_is_not_shaped_either() {
    if !can_make_namespaces() {
        return;
    }
    let net = Net::new();
    let controller: SocketAddr = ([10, 99, 0, 1], 7070).into();
    let mut config = net.config();
    config.controller = Some(controller);
    let (listener, mut shaper) = net.within(|| {
        let mut shaper = Shaper::new(config).unwrap();
        shaper.apply("v0", &shape(0.0, 0.0, 0.0, 1000.0)).unwrap();
        (TcpListener::bind(controller).unwrap(), shaper)
    });
    let before = sent(&net, CONTROL);
    net.within_peer(|| tcp(controller));
    assert!(sent(&net, CONTROL) - before >= PACKETS / 2, "the answers to connections");
    drop(listener);
    net.within(|| shaper.restore().unwrap());
}

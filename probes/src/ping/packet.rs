//! ICMP and ICMPv6 echo messages.

/// An echo reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EchoReply<'a> {
    /// The sender's identifier (set by the kernel on unprivileged sockets).
    pub id: u16,
    /// The number.
    pub seq: u16,
    /// What was sent along.
    pub payload: &'a [u8],
}

/// An echo request. The checksum is ours for IPv4; for IPv6 and for unprivileged sockets the kernel puts its own.
pub fn encode_request(v6: bool, id: u16, seq: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = vec![if v6 { 128 } else { 8 }, 0, 0, 0];
    bytes.extend(id.to_be_bytes());
    bytes.extend(seq.to_be_bytes());
    bytes.extend(payload);
    if !v6 {
        let sum = checksum(&bytes);
        bytes[2..4].copy_from_slice(&sum.to_be_bytes());
    }
    bytes
}

/// An echo reply among what an ICMP socket received; `with_ip_header` for raw IPv4 sockets. `None` for everything
/// else.
pub fn parse_reply(bytes: &[u8], v6: bool, with_ip_header: bool) -> Option<EchoReply<'_>> {
    let message = if with_ip_header {
        let words = usize::from(bytes.first()? & 0x0f);
        bytes.get(words.max(5) * 4..)?
    } else {
        bytes
    };
    let (header, payload) = message.split_first_chunk::<8>()?;
    let expected = if v6 { 129 } else { 0 };
    (header[0] == expected && header[1] == 0).then(|| EchoReply {
        id: u16::from_be_bytes([header[4], header[5]]),
        seq: u16::from_be_bytes([header[6], header[7]]),
        payload,
    })
}

/// The Internet checksum: one's complement of the one's complement sum of 16-bit words.
fn checksum(bytes: &[u8]) -> u16 {
    let word = |pair: &[u8]| u32::from(pair[0]) << 8 | u32::from(pair.get(1).copied().unwrap_or(0));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn checksums_to_zero() {
        for payload in [&b""[..], b"a", b"some bytes"] {
            assert_eq!(checksum(&encode_request(false, 7, 9, payload)), 0);
        }
    }

    #[test]
    fn a_reply_is_read_with_and_without_ip_header() {
        let mut message = encode_request(false, 7, 9, b"hello");
        message[0] = 0;
        let reply = EchoReply { id: 7, seq: 9, payload: b"hello" };
        assert_eq!(parse_reply(&message, false, false), Some(reply));
        let with_header = [&[0x45; 20][..], &message].concat();
        assert_eq!(parse_reply(&with_header, false, true), Some(reply));
        assert_eq!(parse_reply(&message, true, false), None);
        message[0] = 129;
        assert_eq!(parse_reply(&message, true, false), Some(reply));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..100), v6: bool, header: bool) {
            let _ = parse_reply(&bytes, v6, header);
        }
    }
}

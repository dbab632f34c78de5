"""Encoders for the image variants that Pillow cannot write.

Each is the smallest writer that makes a valid file; none is an example to follow elsewhere.
"""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
ADAM7 = (
    (0, 0, 8, 8),
    (0, 4, 8, 8),
    (4, 0, 8, 4),
    (0, 2, 4, 4),
    (2, 0, 4, 2),
    (0, 1, 2, 2),
    (1, 0, 2, 1),
)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    """One PNG chunk with its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    samples: np.ndarray,
    depth: int,
    colour_type: int,
    *,
    chunks: tuple[tuple[bytes, bytes], ...] = (),
    interlaced: bool = False,
) -> bytes:
    """A PNG of ``samples`` (height, width, channels), whose values fit in ``depth`` bits."""
    height, width = samples.shape[:2]
    passes = ADAM7 if interlaced else ((0, 0, 1, 1),)
    rows = b"".join(
        b"\0" + _packed_row(row, depth)
        for top, left, down, right in passes
        for row in samples[top::down, left::right]
        if row.size
    )
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, interlaced)
    return b"".join(
        (
            PNG_SIGNATURE,
            png_chunk(b"IHDR", header),
            *(png_chunk(*chunk) for chunk in chunks),
            png_chunk(b"IDAT", zlib.compress(rows)),
            png_chunk(b"IEND", b""),
        )
    )


def _packed_row(row: np.ndarray, depth: int) -> bytes:
    if depth >= 8:
        return row.astype(">u2" if depth == 16 else "u1").tobytes()
    bits = np.unpackbits(row.astype(np.uint8).reshape(-1, 1), axis=1)[:, 8 - depth :]
    return np.packbits(bits).tobytes()


def bmp(
    rows: list[bytes],
    width: int,
    bits: int,
    palette: bytes = b"",
    *,
    compression: int = 0,
    top_down: bool = False,
    core: bool = False,
) -> bytes:
    """A BMP of ``rows`` (first row first), each already packed at ``bits`` a pixel."""
    if compression:
        body = b"".join(rows[::-1])
    else:
        body = b"".join(row + bytes(-len(row) % 4) for row in (rows if top_down else rows[::-1]))
    height = -len(rows) if top_down else len(rows)
    if core:
        info = struct.pack("<IHHHH", 12, width, height, 1, bits)
    else:
        info = struct.pack(
            "<IiiHHIIiiII",
            40,
            width,
            height,
            1,
            bits,
            compression,
            len(body),
            0,
            0,
            len(palette) // 4,
            0,
        )
    offset = 14 + len(info) + len(palette)
    return struct.pack("<2sIHHI", b"BM", offset + len(body), 0, 0, offset) + info + palette + body


def rle8(row: bytes) -> bytes:
    """One row of BMP run-length coding: a run of one for every pixel."""
    return b"".join(bytes((1, value)) for value in row) + b"\0\0"


def exif(orientation: int, byte_order: str = "<") -> bytes:
    """The TIFF structure that carries one EXIF orientation."""
    mark = b"II" if byte_order == "<" else b"MM"
    return mark + struct.pack(byte_order + "HIHHHIHHI", 42, 8, 1, 0x0112, 3, 1, orientation, 0, 0)


def jpeg_segment(marker: int, body: bytes) -> bytes:
    """One JPEG marker segment."""
    return struct.pack(">BBH", 0xFF, marker, len(body) + 2) + body


def insert_after_soi(jpeg: bytes, *segments: bytes) -> bytes:
    """``jpeg`` with ``segments`` in front of all of its own."""
    return jpeg[:2] + b"".join(segments) + jpeg[2:]


def without_segment(jpeg: bytes, marker: int) -> bytes:
    """``jpeg`` less its first segment ``marker``."""
    start = jpeg.index(bytes((0xFF, marker)))
    (length,) = struct.unpack_from(">H", jpeg, start + 2)
    return jpeg[:start] + jpeg[start + 2 + length :]


def webp_with_exif(webp: bytes, width: int, height: int, body: bytes) -> bytes:
    """A simple lossy WebP turned into an extended one with an EXIF chunk."""
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    extended = b"VP8X" + struct.pack("<I", 10) + b"\x08\0\0\0" + size
    metadata = b"EXIF" + struct.pack("<I", len(body)) + body + bytes(len(body) % 2)
    payload = b"WEBP" + extended + webp[12:] + metadata
    return b"RIFF" + struct.pack("<I", len(payload)) + payload


def rare_jpeg(name: str) -> bytes:
    """A JPEG variant that no Python encoder at hand writes."""
    return base64.b85decode(RARE_JPEGS[name])


# An 18 x 26 gradient, by simplejpeg (440, 411), jpegtran (arithmetic), imagecodecs.jpeg8_encode:
# bitspersample=12, lossless=True, and colorspace="CMYK" with outcolorspace="YCCK".
RARE_JPEGS = {
    "jpeg-440": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOFu3lJ"
        "6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6"
        "ciK`6ciK`6ciK`6ciK`6cqo!01*fP5&#+l0TKWL5di}c0sq7R9{>OW1pxs80RaI300000000010s{mE1_uZU3Jd?"
        "l0JRVR0s#X90t5pE1q1{D00Dgg0s{a95d{(<F+m0sQDFxnaTGFvk)a49Lb1UWQqk}vGh%Xr2?`b$7#SKRCMPH<Dl"
        "|1VH#j*uLqtVJM@UIZQ&d$}S6EqEV`OD!XJ~0^b98lfcX)YvgM@{Khlq)al9QB`mY0~BnxdnmrKYE-sj9NGw6(Uk"
        "xVgH*!^FkL$H>Xb($mz{*4NnC+Tr5k<mKk)=;`Y5^7Hid_V@Vt`v1fL9{~UZ0RaI40RaI40RR91000010s{mE1_u"
        "ZU3Jd?l0JRYS0s#U91Oo&I1q1{D0Rndb0RjUN1O*{61`<J02Vrp&A~Jyp6he`qvB3!=Gg9ysVsg<679=#`CGi&+8"
        "5$-hC@Cs6Ha9pqIzvQ7Mn_0VN>fx-R##YAT4Q8oW@l(=YIAgTc6WGrdV+(5g@%WSiHeewl$Dm3n3<ZQqok##r>Lo"
        "_va__cwzs&sy28W6#m2|T$;#5x)YaD4*xB0R<K*S$=jiF`^7Hid_V@Vt`v2Mh3<CiG0ucid06zfuvq1Q1_kVTzSJ"
        "nCl!%m;N{VT?$nE9WX<(zG|ym+>O@YC-8>-4Xy^dE+uKXv+7t4lHSKUd2*+i!UBT?65#-Tl|;UsvcK4L<Mgze@FK"
        "W<F=?`DYt#?;k&>!#|XM=eMPOUcU`KQTwjmmE5x*Gw$QY+I(l7=n%*9{EPWfUyf2g$egpG=(+?k{J$dpR9CA={bM"
        "WWdNzR!e0+=fQC_tp^?b9T*Q_z^A0qVhqPq{fj>rGm"
    ),
    "jpeg-411": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOFu3lJ"
        "6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6"
        "ciK`6ciK`6ciK`6ciK`6cqo!01*fP5&#+l0YLx)5di}c0sq7R9{>OW1pxs80RaI300000000010s{mE1_uZU3Jd?"
        "l0JRVR0s#X90t5pE1q1{D00Dgg0s{a95d{(<F+m0sQDFxnaTGFvk)a49Lb1UWQqk}vGh%Xr2?`b$7#SKRCMPH<Dl"
        "|1VH#j*uLqtVJM@UIZQ&d$}S6EqEV`OD!XJ~0^b98lfcX)YvgM@{Khlq)al9QB`mY0~BnxdnmrKYE-sj9NGw6(Uk"
        "xVgH*!^FkL$H>Xb($mz{*4NnC+Tr5k<mKk)=;`Y5^7Hid_V@Vt`v1fL9{~UZ0RaI40RaI40RR91000010s{mE1_u"
        "ZU3Jd?l0JRYS0s#U91Oo&I1q1{D0Rndb0RjUN1O*{61`<J02Vrp&A~Jyp6he`qvB3!=Gg9ysVsg<679=#`CGi&+8"
        "5$-hC@Cs6Ha9pqIzvQ7Mn_0VN>fx-R##YAT4Q8oW@l(=YIAgTc6WGrdV+(5g@%WSiHeewl$Dm3n3<ZQqok##r>Lo"
        "_va__cwzs&sy28W6#m2|T$;#5x)YaD4*xB0R<K*S$=jiF`^7Hid_V@Vt`v2Mh3<CiG0ucid06zfuvq1Q1_kVTzSE"
        "Fbj4L<Mgze@C71L3FL{nzPTdVDkaNA7!iSF@MmG(T?e?>qg{*P&BD_-WJkU!{6BgYeU*?!QX(T?65#-Tl|;U3&a9"
        "`A6=%dRNS4_>DI|0`TuU{nFQ==XwM&{J$dpRp`0|G5o(G{#EGO1TpdQFXdf&!yeJ{FHcJGviI(vmH2lldnK<!|Je"
    ),
    "jpeg-arithmetic": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOFu3lJ"
        "6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6"
        "ciK`6ciK`6ciK`6ciK`6cqo-01*fP5&#+l0U`hb5di}c0sqVZ3IGrg1pyEd1^?Or3<CiG0ucid06zf#0O@j=Bo6T"
        "+d%tH5_nYoP{{Y^57lPzN{UPwr9;(@d@cuQS@)z;i4_=>3&kBJeTpIj#K(mgc*~TNC7P?h(q^E%=>{{*x^@UrpVB"
        "2!{NROUPqGVakZnha0FRpo{KNW4<ZIjqgNb2Zp{+oV}v<=?|jxhh("
    ),
    "jpeg-arithmetic-progressive": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOFu3lJ"
        "6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6"
        "ciK`6ciK`6ciK`6ciK`6cqo;01*fP5&#+l0U`hb5di}c0sqVZ1^^HN5dYc$3<CiG0uTcb000610MgSxpv`r*ce1>"
        "~Ek)@E_k2c77og}huJeKa%m4%s1^?Or2mt{A0R;jTQ*uW}1q`x->@hz9OS%)pu+ispfd9+@1Q7-Q+5iXv0|5a)0T"
        "v?U>@iSx570$6%1pHX%m4%t1^?Or2mt~C0Y3p6kfIR+Q?UQc00a;P|Jncu0RaF8KLTD8@#-M|%m4%s1^?Or2mt{A"
        "0Y4$vL2h8VcvAt}QNb7E|Jncy0|5X600RI301(`R1^>(d1Q7-Q+5iXv0|5a)5Ys}|p#RJO1Q7-Q+5iXv0s#R(5Y-"
        ";@zW>Ys1P}%P+5iXv0RRC%5FcyJwpb_d&|9s$HctTD|Je"
    ),
    "jpeg-12bit": (
        "|JeWF01!$>Nk#wx0RR9200961|JwjV00RO70|EjA0|NsD0|NvF2n7WM1O*BQ2L=cX3JeSj3JVJj4iXRz4iOFu3lJ"
        "6%5fc;@6%`B*7Z?^47!ni}6#v@*LjeN>1O)^I2?YfS6b%av6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6"
        "ciK`6ciK`6ciK`6ciK`6cqo#01*rT5&#+l0U`hb5di}c0sq7R8vp<T0R;d60000000000000052Lb~G1`Yqj05T8"
        "&0RjXA1qT8L00000000010t5g91qKHpF%c3IBtaA-GGSwZp%x_~CNx4)agqPT02cuO0|5X40000000000000001O"
        "*2F!~iZ4009C61O^KL00000000000RjU65g`NxF;Nl|HAHf;A~G{HQets)g0j*7+5ij#0RRFK0}%i}0OkVGT-Xa-"
        "^rq^$)Usy)1J>Kb^L~cDdL(2sg-z9mZS1O#=F5>vG~x<_*896SZE_vQhvi4y#F=kjxVGI6e#(_7iNQ)0R-3yy%!h"
        "s9`BC>UfMO;uuF!sz(A1@tBmgSR_le;(^|kZSBO#m!Tef$LuPG(MQz5QFl+OiJaHcp8jLM5cj~ltL7Kvy(yf@)bk"
        "`vKf*b7|rrs}!WvS$DT*89Zseuln!BxEy-)CqWcC{)q)t;n8QUPzqWf%ry;vmK&03wr*=w&-*ARH;Nx-cYKv-Pz7"
        "$JMRz5kGYEISe1*yiBATQLG1GKHv=@E2<Rr|{X))y+LpUpiP9ufUTKacun8wKN=OL+O`E;f%T{oeBdWdOywRI+3D"
        "WAXL3l&S;DYpn#a5s@1Fueyjg?8@vuj%&Pa7%7Nbe3n%V)G}rf2<v2-7cW{Lj$CZ|uhXw>c&rQtGckctgqHg7kyM"
        "R-iiruTGJhZN78#?Jt;{`dMGR{{R655Ix^s_56z$e_?0gUo=Pm*#"
    ),
    "jpeg-lossless": (
        "|JeWT01iQ9Z(?NtWB>pF0095P01*fP5&#+lQV{@05dcCF0RO}Q7XSbQ0RR910000000000000031PA}x01N|C07n"
        "2q00961!f<>hk+hAZZ6j$LNZLlyHj%WAq-`T<8%Wwl(l(K_jihZOX&Xq|M$$HsrLClGBWW8*+D6hgk+hAZZ6j$LN"
        "ZLlyHj%WAq-`T<8%Wwl(l(K_jihO7X&Xq|M$$Hsw2h=~BWW8*+D6hgk+hAZZ6j$LNZLlyHj%WAq-`T<8d};$(l(K"
        "_jihZOX&Xq|M$$Hsw2h=~BWW8*+D6hgk+hAZZ6j$LNZLl0wvn`rq-`T<8%Wwl(l(K_jihZOX&Xq|M$$Hsw2h=~BW"
        "W8*+D6hgk)^GqZ6j$LNZLlyHj%WAq-`T<8%Wwl(l(K_jihZOX&Xq|M$$Hsw2h=`YiS!u+D6hgk+hAZZ6j$LNZLly"
        "Hj%WAq-`T<8%Wwl(l(K_jihZOX&PGEM$$Hsw2h=~BWW8*+D6hgk+hAZZ6j$LNZLlyHj%WAq-`T<8%WwlmbQ_!jih"
        "ZOX&Xq|M$$Hsw2h=~BWW8*+D6hgk+hAZZ6j$LNZLlyHj$;Rq-`T<8%Wwl(l(K_jihZOX&Xq|M$$Hsw2h=~BWW8*+"
        "D6hgk+hAZX=`a4NZLlyHj%WAq-`T<8%Wwl(l(K_jihZOX&Xq|M$$Hsw2h=~BWW61+D6hgk+hAZZ6j$LNZLlyHj%W"
        "Aq-`T<8%Wwl(l(K_jihZOX&Xq|MwYgbw2h=~BWW8*+D6hgk+hAZZ6j$LNZLlyHj%WAq-`T<8%Wwl(l(K$t)y)uX&"
        "Xq|M$$Hsw2h=~BWW8*+D6hgk+hAZZ6j$LNZLlyHj%WAq-kqu8%Wwl(l(K_jihZOX&Xq|M$$Hsw2h=~BWW8*+D6hg"
        "k+hAZZ6j$KTG~d^Hj%WAq-`T<8%Wwl(l(K_jihZOX&Xq|M$$Hsw2h=~BWW8*+D4YPk+hAZZ6j$LNZLlyHj%WAq-`"
        "T<8%Wwl(l(K_jihZOX&Xq|M$$HsrLClGBWW8*+D6hgk+hAZZ6j$LNZLlyHj%WAq-`T<8%Wwl(l(K_jihh?*#"
    ),
    "jpeg-ycck": (
        "|JeWT01iQ9Z(?NtWB>pF00RHp07C!+0s;d90s{jB0|WyD1O*5M1q1{I3I_)U2n-4g3=0Yi3k?nu5Dg9y4hstq77!"
        "5=6crT}3=bC=78Do~6crTz+W<oW0|W#G1O*8N1ql=l3k?($6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6ciK`6"
        "ciK`6ciK`6ciK`6ciK`|G)qg2mlfQ8Uz6%00I#K0}%lPA^`uy03QGV0R;g80RaI400000000000RjUA1qKHQ2?`7"
        "U!~nGr00IF60|EpC1qB2I0004f0RjU61Q7)iAu&M)6H#FYB5@QlfsvsIBSNvk6;jdgBr{@if(Z&17Z@2DB_<~*DJ"
        "nEIHa9pqIzvQ7Mn_0VN>fx-R##YAT4Q8oW@l(=YIAgTc6WGrdV_?8hKGoWijtF*m6n&7nVO=bq@|{(sHv*5v$VCg"
        "x45~w!o$SH#>dFX%F@%+)z;V8+1laa<K*S$=jiF`@$&QZ_4fDp`TGCF03QJW0|5a60RaI40RaF2000000RjUA1qK"
        "HQ2?`7U!~nGs00IF51Ox*F2L%KK009Db009C65d;MxF$NMrQ3qjh6CyH!2oyq*p|QaUBQsL)6=HJH3Kk?Z;U)1G7"
        "#SKSCnzZ@H8wXmIXXi`MMg(RNlH^xRaRG6Sz2RcWoBn+X=-zHb#`}nd3u6_goTEOh>41lla!T~mzbHFqNAjxrl+W"
        ">s<N}RwYImoxw^u`#Kp$P$jQpm)6~`0*Vx(G;^XAy=I7|?>hkmS_4fDp`TGCb01gBJ00I#M5d;7LKLGnfUig>yzk"
        "B-Eoon9`{`c>HTJc?b;$PnV@9SQ5uY61U-@W~7zY~{vA49~v74dtg=6{C2g1uM6U%_5g;jiGYRq)sFSG4Qj68`t^"
        "e_G@l;$O^vec#r;f7iYx{qNrXwa7QbznK2_zpZ@5Y`@;v{$I{GEBF5Z3F_V&{tE6>?l01~Zw-G1cPaN5>0XJiO()"
        "Isx947UuT3Y-^S9?k75a`O{{Txkm+c=7_-ptp)qFMl6j5GvuT3Y-^S9?*drc<e^S57GD6g8U@gK|i$MMfr@YnEHa"
        "-VU2lu=***#"
    ),
}

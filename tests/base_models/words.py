"""Words that tools, prompts and descriptions of the scripted conversations consist of."""

_VERBS = """
add answer append apply ask assign begin book build buy call cancel change check choose clear click close commit
compare compute convert copy count create cut delete divide draw drop edit end enter evaluate execute fetch fill
filter find finish fix flip format get give guess hit insert inspect join jump keep list load lock look make merge
move multiply open order pack parse pass pay pick place play plot press print pull push put query read release remove
rename repair replace reply report reset resolve return roll rotate run save scan score search select sell send set
show shift shuffle sort split start step stop store submit subtract sum swap switch take test throw touch translate
turn type undo unlock update use view visit vote wait walk write
"""
_NOUNS = """
account action address age amount angle answer area array author bag balance ball bank base board body book bottle box
branch bucket budget button buffer card cart case cell change channel char city class client code coin color column
command comment cost count country course cup currency customer data date day deck depth digit direction disk distance
document door edge email engine entry error event expression field file first floor folder format game gate goal grid
group hand height hint hour house id image index input item job key label language last left length letter level limit
line list location map mark market max message min minute mode model money month move name node note number object
offset option order page pair part path person piece place player point port position price product quantity query
question queue rate ratio record region result right room root row rule sample score second seed sequence shape side
size slot source speed stack start state status step stock street string sum switch symbol table tag target task
temperature text ticket tile time title token topic total tree turn type unit url user value vector version volume
wall weight width window word x year zone
"""
_OTHERS = """
a about above after again all also always an and another any are as at away back bad be because before below better
big black blue both bottom but by can clean cold correct dark dead deep different down each early east easy either
empty even every false far fast few for free from full good great green half hard have he her here high his hot how if
in inside into is it its just large late less like little live long low many me middle more most much must near new
next no north not nothing now of off old on once one only or other our out outside over own please possible purple
quick quiet red same several short should slow small so some soon south still such than that the their them then there
these they this three through to today together too top true two under until up very warm was we well west what when
where which while white who why wide will with without wrong yellow yes yet you your zero
"""

VERBS = tuple(_VERBS.split())
NOUNS = tuple(_NOUNS.split())
WORDS = tuple(dict.fromkeys((*VERBS, *NOUNS, *_OTHERS.split())))

_CONSONANTS = "b br c ch d dr f fl g gr h j k l m n p pl qu r s sh st t th tr v w y z"
SYLLABLES = tuple(
    consonant + vowel + end
    for consonant in _CONSONANTS.split()
    for vowel in ("a", "e", "i", "o", "u", "ea", "oo")
    for end in ("", "", "n", "r", "l", "t", "ck", "m", "s", "ng")
)

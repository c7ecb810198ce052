"""The vocabulary of the made-up conversations: common English words, the most frequent ones first.

Only the first lines are in a considered order; a word's rank decides how often it is drawn (see ``workload``), so what
follows them is simply the long tail.
"""

from __future__ import annotations

from typing import Final

_TEXT: Final = """
the of and to a in that is was it for on with as be at by this had not are but from or have an they which one you were
all her she there would their we him been has when who will no more if out so up said what its about than into them can
only other time new some could these two may first then do any like my now over such our man me even most made after
also did many off before must well back through years much where your way down should because long each just state
those people too how little good world make very year still see work life between never another know last great same
old since right day used come himself take three use house few while might part home place however again against say
small found went every number thought always away something fact water though less public put think almost hand enough
far took head yet government system better set told nothing night end why called look find going asked later point knew
next city give group toward young days room side social present several order national second possible rather per face
among form important often things early white case large need big four within felt children along saw best church ever
least power development light thing seemed family interest want members mind country area others done turned although
open god service certain kind problem began different door thus help sense means whole matter times name law human line
sort already school perhaps local history gave itself until during word program plan company free across money question
office quite party person field taken section action having held words close result change full morning reason research
report table paper letter list answer check value file text code data user agent tool search call step model page link
test error message note task request reply summary draft review update run start stop read write send save load store
key input output server client network address index query record version branch release build deploy project team
meeting customer invoice payment account balance budget cost price market product shipment delivery warehouse supplier
contract clause deadline schedule calendar holiday travel flight hotel ticket train station airport street road bridge
river mountain forest garden island beach ocean weather rain snow storm wind cloud winter spring season month hour
minute evening afternoon today tomorrow soon recently usually rarely suddenly quickly carefully clearly exactly nearly
probably certainly maybe indeed therefore otherwise besides anyway apart alone outside above behind beside under near
upon without achieve add advise affect agree aim announce appear apply arrange arrive attempt attend base beat begin
behave belong bend blame block boil borrow break breathe broadcast burn calculate cancel catch cause charge chase
choose claim climb collect compare compete complete concern connect consider contain continue control convert cook copy
count cover cross cry cut dance deal declare decrease define delay demand deny describe deserve destroy detect develop
die disagree disappear discuss divide doubt drag dream dress drive drop earn eat emerge employ encourage enjoy enter
escape estimate examine exchange exclude exist expand experience explain express extend fall feed fight fill fit float
flow fold follow forget forgive gather generate grant greet guarantee guard guide hang hate hear hesitate hide hit hold
hunt hurry identify ignore improve include indicate influence insist install introduce invent invite involve judge jump
keep kick kiss knock land laugh lay lead lean leave lend lie lift listen live lose love manage mark match mean meet
mention mix move observe obtain offer operate organize own paint pass perform permit pick play pour practise prepare
prevent promise promote prove provide pull punish push quote range rank react realize recognize recommend recover refer
reflect regret reject relax rely remember remind rent repair replace represent rescue resist respect respond restore
retire reveal ride rise risk rub ruin satisfy scream seek select separate serve shake shape shine shoot show shut sing
sink sleep slide smile smoke sound speak spend spread stand stay steal stretch strike study submit suffer suggest
supply support surprise surround suspect swim switch talk teach tear threaten throw touch trace transfer transform trap
treat try turn understand unite vary visit wait wake wander warn waste watch weigh welcome wish wonder worry ability
absence accident activity adult advance advice affair agency agreement alarm album amount analysis angle animal
apartment apple argument army art article aspect assembly association assumption attention attitude author authority
award baby bag ball bank bar basket bath beauty bed bell benefit bird birth blood board boat bone bonus border bottle
bowl box brain bread breath brick brother brush bush business cable cake camp campaign candidate cap captain car care
career cash cat cell center ceremony chain challenge champion channel chapter charity chart chemical chest chief child
choice circle class clerk clock clothes club coal coast coffee coin colleague collection color column command comment
committee communication comparison competition computer concept conclusion condition confidence conflict congress
connection construction contact context contrast conversation copper cotton council couple courage court cousin cream
creature crew crime criticism crop crown cup current curve custom dad danger database date dealer death debt decade
decline deer defense definition democracy department depth description desire desk device dialogue diet difference
dinner direction dirt disaster discount discovery disease dish display distance district division document dog drama
drawer driver drug duty ear ease east economy edition editor efficiency effort election element emergency emotion
employee employer engine engineer environment equipment essay estate evidence exam exception excitement exercise exit
expense expert export expression extreme eye factor factory faith farm fashion fat fault favor feature fee fence
festival figure film fire firm fish flat flavor flower focus foot football frame freedom front fruit fun function
furniture future game gap gas gate generation gift glass goal golf grade grandmother grass growth guest gun guy hair
half handle harbor health heart hell hero hill hole honor hook hospital host housing humor husband idea identity image
impact impression improvement income independence infection inflation initiative injury insect inspection institution
instruction insurance intention interview introduction iron issue jacket job joke journal joy juice jury justice
kingdom kitchen knife knowledge label labor lady lake language laughter layer leader league leather lecture length
lesson library license lip literature location log loss lot lunch machine mail maintenance male management manner
manufacturer margin mass material math meal meaning meat media medium member memory menu method middle mine minister
mirror mission mixture mode monitor mood mother motor mouth movement mud muscle museum nail narrative nature neck
neighbor nerve newspaper noise nose novel object objective occasion offense oil onion operation operator opportunity
opposite orange organization outcome oven package pain pair palace parent park partner passage passion path patient
pattern peace pen pension pepper performance period personality perspective phase phone photo physics piano pie piece
pipe pitch plane plant plate platform pleasure plenty poet poetry policy politics population position possibility post
potato potential practice preference presence presentation pressure priest priority prison prize procedure profession
professor profit progress proof property proposal protection purpose quality quarter queen race rail rate reaction
reader reception recipe recommendation reference region register relation relationship relief religion reputation
reserve resolution resource responsibility restaurant revolution reward rice rock roof root round route row rule salad
salary salt sample satisfaction sauce scene scheme science score script sea secret secretary sector seed selection
senior sentence series session shadow shame shelf shell shift ship shock shoe shoulder shower site situation skill skin
sky slice snake society software soil solution son soul soup south space species speech spirit spite spot spray stable
staff stair standard statement statistic status steel stomach strain stranger stream strength string structure studio
style success sugar sun supermarket surgery survey sweet symbol tale talent tap target tea teacher technology telephone
temperature tennis term territory theme theory threat throat tone tongue topic total tourist tower toy track traffic
transition tree trial trick trouble truck tube tune uncle uniform unit university vacation vehicle victory video
village violence vision voice wage wall wealth weapon wedding weekend west wheel window wine winner wire wood worker
worth wound yard youth able angry bad basic blind bright busy calm civil clever common cool curious dark dead delicate
distant eastern easy entire equal extra fair familiar famous fierce final foreign formal friendly gentle glad grand
green happy harsh heavy high honest huge hungry illegal immediate initial inner jealous keen lazy legal lonely loose
low loyal main major mental mild military mobile modern moral mutual natural neat neutral nice normal northern odd
official original pale perfect permanent plain pleasant poor popular practical pregnant primary private proud pure
quiet random rare raw real recent regular relevant remote rich royal rude sad safe severe shallow short shy sick silly
similar single slight smart smooth solid southern specific steady stiff strange strong stupid sudden sufficient super
sure temporary tender thin thirsty tiny tired tragic typical unable unusual urban urgent usual vague valuable various
violent visible warm weak weird wet wild wise wooden wrong yellow
"""

WORDS: Final = tuple(_TEXT.split())
